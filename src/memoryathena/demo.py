"""`make demo`: what a person does with a memory, on a real model."""

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from memoryathena.backbone.load import load_backbone
from memoryathena.backbone.model import AthenaModel, get_athena_model
from memoryathena.backbone.text import complete
from memoryathena.config import AthenaConfig
from memoryathena.memory.system import sizes

PROMPT = "The library at Alexandria was"


def run(backbone_name: str, sites: list[int], folder: Path, console: Console) -> None:
    """Attach, generate under every pathway, save, load, trace, detach; every claim printed is checked here."""
    console.rule(f"1 · a memory beside {backbone_name}")
    backbone, tokenizer = load_backbone(backbone_name)
    batch = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        bare = backbone(**batch).logits
    model = get_athena_model(backbone, AthenaConfig.preset("small", sites=sites), tokenizer)
    model.print_trainable_parameters()
    _print_sizes(model, console)

    console.rule("2 · the same prompt under every pathway")
    for use in ("off", "E", "GE", "GH", "router"):
        with model.use(use):
            console.print(f"[bold]{use:>7}[/] {PROMPT}[cyan]{complete(model, PROMPT, 16)}[/]", highlight=False)

    console.print("The memory is fresh: it has learned nothing yet, so all pathways say much the same.", style="dim")

    console.rule(f"3 · saved to {folder}, loaded again")
    model.save_pretrained(folder)
    with torch.no_grad():
        before = model(**batch).logits
    model.detach()
    model = AthenaModel.from_pretrained(folder, backbone=backbone, tokenizer=tokenizer)
    with torch.no_grad(), model.trace() as trace:
        same = torch.equal(model(**batch).logits, before)
    console.print(f"logits after loading are the same, bit for bit: {same}")
    for site, row in trace.summary().items():
        console.print(f"site {site}: mass {row['mass']}, admission {row['admission']:.0%}", highlight=False)

    console.rule("4 · taken off")
    with torch.no_grad():
        gone = torch.equal(model.detach()(**batch).logits, bare)
    console.print(f"the backbone is as it came, bit for bit: {gone}")
    console.print(
        f"\nNext: athena check {folder} · athena inspect {folder} · "
        f'athena generate --backbone {backbone_name} --adapter {folder} --prompt "Once upon a time"'
    )
    if not (same and gone):
        raise SystemExit(1)


def _print_sizes(model: AthenaModel, console: Console) -> None:
    counted = sizes(model.config_athena)
    table = Table("part", "parameters")
    table.columns[1].justify = "right"
    table.add_row("table, shared by all sites", f"{counted['table']:,}")
    for name, value in counted["per_site"].items():
        table.add_row(f"each site · {name}", f"{value:,}")
    table.add_row("memory side", f"{counted['memory_side']:,}")
    console.print(table)

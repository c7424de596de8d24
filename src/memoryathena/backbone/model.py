"""AthenaModel: a frozen causal language model with a memory beside it."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from memoryathena.backbone import artifacts
from memoryathena.backbone.card import model_card
from memoryathena.backbone.decoder import Decoder, default_capture, greedy_call
from memoryathena.backbone.fingerprint import (
    backbone_fingerprint,
    check_backbone,
    check_tokenizer,
    tokenizer_fingerprint,
)
from memoryathena.backbone.injection import Injection, Plan
from memoryathena.backbone.sites import find_blocks
from memoryathena.backbone.slots import Column, slot_cache
from memoryathena.backbone.tokens import token_bytes
from memoryathena.backbone.trace import Trace
from memoryathena.config import AthenaConfig
from memoryathena.errors import AthenaError
from memoryathena.memory.addressing import Addressing
from memoryathena.memory.controls import TABLES
from memoryathena.memory.hashing import HashConstants
from memoryathena.memory.policies import AUXILIARY_USES, Policy, parse_policy
from memoryathena.memory.router import Admission
from memoryathena.memory.system import MemorySystem
from memoryathena.memory.table import BYTES, STORES

STAGES = ("fresh", "memory", "pathways", "router")


class AthenaModel(nn.Module):
    """A backbone with a memory. Made by `get_athena_model` or `AthenaModel.from_pretrained`.

    Calls and generates like the backbone; attributes that it lacks are the backbone's. The memory's own parameters
    are `model.memory`; the backbone's are frozen.

    >>> with model.use("E"):                                 # doctest: +SKIP
    ...     out = model.generate(**inputs, max_new_tokens=20)
    """

    def __init__(
        self,
        backbone: Any,
        config: AthenaConfig,
        tokenizer: Any,
        constants: HashConstants | None = None,
        store: str = "device",
    ):
        super().__init__()
        if tokenizer is None:
            raise AthenaError("give the backbone's tokenizer: the memory is addressed by the text of its tokens")
        host = backbone.get_base_model() if hasattr(backbone, "peft_config") else backbone
        if any(isinstance(hook, Injection) for hook in _owners(host)):
            raise AthenaError("this backbone already has a memory attached: detach it first")
        blocks = find_blocks(host, config.block_path)
        config = fit(config, host, len(blocks))
        memory = config.memory
        constants = constants or HashConstants.draw(memory.orders, memory.heads, memory.seed, memory.scheme)
        vocabulary = int(host.get_input_embeddings().weight.shape[0])

        self.config_athena = config
        self.tokenizer = tokenizer
        self.stage = "fresh"
        self.constants = constants
        self.backbone = backbone
        self.memory = MemorySystem(config)
        tokens = token_bytes(tokenizer, vocabulary)
        addressing = Addressing(tokens, memory.orders, memory.rows, memory.canonical, memory.scheme, constants)
        self.addressing = addressing
        self._was = {name: p.requires_grad for name, p in backbone.named_parameters()}
        self._was_training = backbone.training
        self._use = "router"
        self._injection = Injection(host, blocks, self.memory, addressing)
        self._decoder: Decoder | None = None
        for parameter in backbone.parameters():
            parameter.requires_grad_(False)
        self._place(blocks, store)
        self._injection.attach()
        self._refresh()
        self.train(False)

    # -- making one -----------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path,
        backbone: Any,
        tokenizer: Any,
        *,
        memory: str | Path | None = None,
        store: str = "device",
        revision: str | None = None,
        token: str | None = None,
    ) -> Self:
        """Load a saved memory onto a backbone. `memory` reads the table from elsewhere (it must be the same one).

        store: where its rows live (see `store_table`); with 'mmap' they are never loaded as a whole.
        """
        folder = artifacts.find_artifact(path_or_repo, revision, token)
        config, data = artifacts.load_adapter_config(folder)
        where = str(path_or_repo)
        host = backbone.get_base_model() if hasattr(backbone, "peft_config") else backbone
        blocks = find_blocks(host, config.block_path)
        check_backbone(data["backbone"], backbone_fingerprint(host, blocks), where)
        check_tokenizer(data["tokenizer"], tokenizer_fingerprint(tokenizer), where)
        table_folder = Path(memory) if memory is not None else folder / artifacts.MEMORY_FOLDER
        memory_config, constants, digest, fingerprint = artifacts.load_memory_config(table_folder)
        if fingerprint != data["memory"]:
            raise AthenaError(
                f"{where} was made with memory {str(data['memory'])[:12]}; {table_folder} is memory {fingerprint[:12]}"
            )
        if store not in STORES:
            raise AthenaError(f"unknown store {store!r}; known: {', '.join(STORES)}")
        config = config.override(memory=memory_config.model_dump())
        model = cls(backbone, config, tokenizer, constants, store=store)
        try:
            load = artifacts.map_table if store == "mmap" else artifacts.load_table
            load(table_folder, digest, model.memory.table)
            model.store_table(store)
            artifacts.load_sites(folder, data, model.memory.sites)
        except Exception:
            model.detach()
            raise
        model.stage = data["stage"]
        return model

    def save_pretrained(self, folder: str | Path, *, table: bool = True) -> None:
        """Write adapter, table and card. With `table=False` the table is left out: it is shared and known."""
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise AthenaError(f"{folder} is a file: give a folder to save to")
        config = self.config_athena
        backbone = backbone_fingerprint(self._injection.host, self._injection.blocks)
        tokenizer = tokenizer_fingerprint(self.tokenizer)
        if table:
            fingerprint = self.save_memory(folder / artifacts.MEMORY_FOLDER)
        elif (folder / artifacts.MEMORY_FOLDER / artifacts.MEMORY_CONFIG).is_file():
            fingerprint = artifacts.load_memory_config(folder / artifacts.MEMORY_FOLDER)[3]
        else:
            raise AthenaError(f"{folder} has no memory folder yet: save it once with table=True")
        from memoryathena import __version__

        data = {
            "version": __version__,
            "stage": self.stage,
            "config": artifacts.json_config(config),
            "backbone": backbone,
            "tokenizer": tokenizer,
            "memory": fingerprint,
        }
        artifacts.save_adapter(folder, data, self.memory.sites)
        parameters = sum(p.numel() for p in self.memory.parameters())
        card = model_card(config, self.stage, backbone, tokenizer["name"], parameters)
        artifacts.write_atomically(folder / "README.md", lambda temporary: temporary.write_text(card))

    def save_memory(self, folder: str | Path) -> str:
        """Write the table alone, for other backbones to read; returns its fingerprint."""
        if self.memory.table.kind is not None:
            raise AthenaError("the table is quantised: its full rows, which a file keeps, are gone")
        return artifacts.save_memory(Path(folder), self.config_athena.memory, self.constants, self.memory.table)

    def store_table(self, store: str, quantise: str | None = None) -> None:
        """Say where the table's rows live, and in how many bits.

        'device': where the embeddings are. 'host': in pinned memory, from which a GPU reads the rows it needs. 'mmap':
        in the file they were loaded from (`from_pretrained(..., store="mmap")`). quantise: 'int8' or 'fp8', under one
        scale per row; what that loses `athena bench table` says. A table that was moved or quantised is not trained.
        """
        table = self.memory.table
        if store not in STORES:
            raise AthenaError(f"unknown store {store!r}; known: {', '.join(STORES)}")
        if quantise is not None and quantise not in BYTES:
            raise AthenaError(f"unknown quantisation {quantise!r}; known: {', '.join(BYTES)}")
        if store == "mmap" and (table.store != "mmap" or quantise):
            raise AthenaError("a table is mapped when it is loaded, as it is: from_pretrained(..., store='mmap')")
        if quantise is not None and table.kind is not None:
            raise AthenaError(f"the table is quantised to {table.kind} already")
        if self._decoder is not None:
            self._decoder.forget()
        if quantise is not None:
            table.quantise(quantise)
        if store == "device" and table.store != "device":
            table.store = "device"
            table.to(self.input_device)
        elif store != "device":
            table.keep(store)

    def push_to_hub(self, repo: str, *, private: bool = False, token: str | None = None, **kwargs: Any) -> str:
        """Save to a temporary folder and upload it; returns the repository's address."""
        import tempfile

        from huggingface_hub import HfApi

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            url = api.create_repo(repo, private=private, exist_ok=True)
            api.upload_folder(repo_id=repo, folder_path=folder, **kwargs)
        return str(url)

    # -- using it -------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, document_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """The backbone's forward with the memory in it; the same arguments and output.

        document_ids [B, T]: for packed rows, a number per document; n-grams and windows do not cross into the next.
        (Position ids that begin again at 0 say the same.)
        """
        self._injection.document_starts_BT = None
        if document_ids is not None:
            starts_BT = torch.ones_like(document_ids, dtype=torch.bool)
            starts_BT[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
            self._injection.document_starts_BT = starts_BT
        try:
            return self.backbone(*args, **kwargs)
        finally:
            self._injection.document_starts_BT = None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The backbone's `generate`, in every mode it has.

        Greedy with cache_implementation="static" runs as one recorded step (see `compile_decode`).
        """
        inputs = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if isinstance(inputs, Tensor) and inputs.numel() == 0:
            raise AthenaError(f"the prompt is empty (shape {list(inputs.shape)}): give at least one token")
        if isinstance(assistant := kwargs.get("assistant_model"), AthenaModel):
            kwargs["assistant_model"] = assistant.backbone
        if (call := greedy_call(self, args, kwargs)) is not None:
            if self._decoder is None:
                self._decoder = Decoder(self, default_capture(self.input_device), fuse=False)
            return self._decoder(**call)
        if kwargs.get("cache_implementation") == "static" and self._injection.plan is not None:
            kwargs.setdefault("disable_compile", True)  # transformers would compile through the memory's hooks
        return self.backbone.generate(*args, **kwargs)

    def compile_decode(self, *, fuse: bool = True) -> Decoder:
        """Prepare greedy decoding at its fastest; `generate(..., cache_implementation="static")` then uses it.

        The whole step with the memory in it is one CUDA graph on a GPU, recorded at the first use of a pathway,
        batch size and length. fuse: torch.compile fuses the memory's own operations, which takes a while that once.
        """
        slot_cache(self.host.config, 1, Column(torch.zeros(1)))  # raises where a step cannot be recorded
        self._decoder = Decoder(self, default_capture(self.input_device), fuse)
        return self._decoder

    def endpoints(self, uses: tuple[str, ...], **batch: Any) -> dict[str, Tensor]:
        """Logits [B, T, V] under several pathways from one pass, which splits only at the first site."""
        if "labels" in batch:
            raise AthenaError("endpoints gives logits of several pathways; compute their losses from them")
        with self.lanes({use: self.policy(use) for use in uses}):
            out = self(**batch, use_cache=False)
        return dict(zip(uses, out.logits.chunk(len(uses)), strict=True))

    @contextlib.contextmanager
    def lanes(self, policies: Mapping[str, Policy | None]) -> Iterator[None]:
        """Run these policies side by side while the block runs: outputs have their rows one after the other."""
        names, rules = tuple(policies), tuple(policies.values())
        bare = all(rule is None for rule in rules) and len(rules) == 1
        self._injection.plan = None if bare else Plan.make(names, rules, self._injection.sites)
        try:
            yield
        finally:
            self._refresh()

    def use(self, pathway: str) -> contextlib.AbstractContextManager[Self]:
        """Choose the pathway: now and from now on, or, as a context manager, until the block ends.

        'off' is the bare backbone; 'E', 'GE', 'GH' force one pathway; 'router' is the method (the default); 'hard',
        'soft', 'subset-hard', 'subset-soft', 'E+GE', 'E+GH', 'GE+GH', 'random' are the rules it is compared with.
        """
        before = self._use
        self.policy(pathway)
        self._use = pathway
        self._refresh()
        return self._restoring(before)

    @contextlib.contextmanager
    def _restoring(self, before: str) -> Iterator[Self]:
        try:
            yield self
        finally:
            self._use = before
            self._refresh()

    @property
    def in_use(self) -> str:
        """The pathway now in use."""
        return self._use

    @property
    def host(self) -> Any:
        """The causal language model itself, inside whatever wraps it."""
        return self._injection.host

    @property
    def input_device(self) -> torch.device:
        """Where token ids go, also when the weights themselves are offloaded."""
        return _device_of(self._injection.host.get_input_embeddings())

    @contextlib.contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record what the router does at every site and position while the block runs."""
        trace = Trace(tuple(self._injection.sites))
        before, self._injection.observer = self._injection.observer, trace.record
        try:
            yield trace
        finally:
            self._injection.observer = before

    def set_router(
        self,
        tau: float | None = None,
        rho: float | None = None,
        temperature: float | None = None,
        alpha_max: float | None = None,
    ) -> None:
        """Change the admission rule; tau = infinity admits nothing, which is E exactly."""
        changes = {"tau": tau, "rho": rho, "temperature": temperature, "alpha_max": alpha_max}
        given = {name: value for name, value in changes.items() if value is not None}
        self.config_athena = self.config_athena.override(router=given)
        self._refresh()

    def detach(self) -> Any:
        """Take the memory off; returns the backbone as it came."""
        self._injection.plan = None
        self._injection.detach()
        self._decoder = None
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(self._was.get(name, parameter.requires_grad))
        self.backbone.train(self._was_training)
        return self.backbone

    # -- being a module -------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Training mode of the memory alone: a frozen backbone stays in evaluation, without dropout."""
        super().train(mode)
        self.backbone.eval()
        return self

    def print_trainable_parameters(self) -> None:
        """As in peft."""
        trainable = sum(p.numel() for p in self.parameters() if p.requires_grad)
        total = sum(p.numel() for p in self.parameters())
        share = 100 * trainable / total
        print(f"trainable params: {trainable:,d} || all params: {total:,d} || trainable%: {share:.4f}")

    def __getattr__(self, name: str) -> Any:
        """Whatever this model lacks is asked of the backbone (config, device, dtype, …)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "backbone":
                raise
            return getattr(super().__getattr__("backbone"), name)

    # -- inside ---------------------------------------------------------------------------------------------------

    def policy(self, name: str) -> Policy | None:
        """The routing rule called `name`, with this model's thresholds; None for off."""
        config = self.config_athena
        policy = parse_policy(name, Admission.of(config.router), config.seed)
        if config.control == "ffn" and name not in ("off", "E", "router"):
            raise AthenaError(f"control 'ffn' has no pathway {name!r}; it knows: off, E, router")
        if name in AUXILIARY_USES and not config.auxiliary:
            raise AthenaError(f"pathway {name!r} needs the auxiliary heads: attach with auxiliary=True")
        return policy

    def _refresh(self) -> None:
        """Recompute the plan of a pass from pathways and admission rule."""
        policy = self.policy(self._use)
        bare = policy is None
        self._injection.plan = None if bare else Plan.make((self._use,), (policy,), self._injection.sites)

    def _place(self, blocks: nn.ModuleList, store: str = "device") -> None:
        """Each site on its block's device, addressing with the embeddings, and the table unless it lives elsewhere."""
        for index, site in self.memory.sites.items():
            site.to(_device_of(blocks[int(index)]))
        table = self.memory.table
        if store == "device":
            table.to(self.input_device)
        else:
            table.base_H = table.base_H.to(self.input_device)
        self.addressing.to(self.input_device)


def get_athena_model(
    backbone: Any,
    config: AthenaConfig | Mapping[str, Any] | str,
    tokenizer: Any,
    *,
    memory: str | Path | None = None,
) -> AthenaModel:
    """Attach a fresh memory to a loaded causal language model, which is frozen here.

    config: an `AthenaConfig`, a mapping of its fields, or a preset's name. memory: a saved table to read, also one
    that another backbone learned; it takes the place of `config.memory`.

    >>> model = get_athena_model(backbone, "small", tokenizer)          # doctest: +SKIP
    """
    if isinstance(config, str):
        config = AthenaConfig.preset(config)
    elif not isinstance(config, AthenaConfig):
        config = AthenaConfig.build(config)
    if memory is None:
        if config.control in TABLES:
            raise AthenaError(f"control {config.control!r} changes a learned table: give memory, a saved one")
        model = AthenaModel(backbone, config, tokenizer)
        model.memory.reset()
        return model
    table, constants, digest, _ = artifacts.load_memory_config(Path(memory))
    model = AthenaModel(backbone, config.override(memory=table.model_dump()), tokenizer, constants)
    model.memory.reset()
    try:
        artifacts.load_table(Path(memory), digest, model.memory.table)
        if config.control in TABLES:
            with torch.no_grad():
                weight = model.memory.table.weight
                weight.copy_(TABLES[config.control](weight, table, config.seed))
    except Exception:
        model.detach()
        raise
    return model


def fit(config: AthenaConfig, host: Any, blocks: int) -> AthenaConfig:
    """The config with width and sites of this backbone; raise where it says otherwise."""
    text = host.config.get_text_config()
    width, name = int(text.hidden_size), text.model_type
    if config.width not in (None, width):
        raise AthenaError(f"the config has width {config.width}; this backbone ({name}) has width {width}")
    sites = config.sites if config.sites is not None else (blocks // 3,)
    if outside := [site for site in sites if not 0 <= site < blocks]:
        raise AthenaError(f"site {outside[0]} is out of range: this backbone ({name}) has blocks 0 to {blocks - 1}")
    if config.router.tau == -math.inf:
        raise AthenaError("router.tau must not be -infinity: alpha would have no scale")
    return config.override(width=width, sites=sites)


def _device_of(module: nn.Module) -> torch.device:
    """Where a module computes: accelerate brings offloaded weights (which stand on 'meta') to its hook's device."""
    if (device := getattr(getattr(module, "_hf_hook", None), "execution_device", None)) is not None:
        return torch.device(device)
    tensor = next(module.parameters(), None)
    return tensor.device if tensor is not None else torch.device("cpu")


def _owners(host: nn.Module) -> list[Any]:
    """Objects whose bound methods are hooks of this module."""
    return [getattr(hook, "__self__", None) for hook in host._forward_pre_hooks.values()]

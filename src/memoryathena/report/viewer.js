// The case viewer. Everything that a model or a data set wrote goes through textContent.
"use strict";
(() => {
  const holder = document.getElementById("case-data");
  if (!holder) return;
  const sets = JSON.parse(holder.textContent);
  const at = (name) => document.getElementById(name);
  const [chooseSet, search, chooseOne] = [at("case-set"), at("case-search"), at("case-one")];
  const SOURCES = ["E", "GE", "GH"];

  const make = (tag, text, kind) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };
  const lastLine = (text) => {
    const lines = text.split("\n").map((line) => line.trim()).filter((line) => line.length > 12);
    return lines.length ? lines[lines.length - 1] : text.trim();
  };
  const haystack = (one) =>
    [one.text, one.gold, ...one.answers.map((answer) => answer.output)].join("\n").toLowerCase();

  const list = () => {
    const wanted = search.value.trim().toLowerCase();
    const cases = sets[Number(chooseSet.value)].cases;
    const found = cases.map((one, place) => [one, place]).filter(([one]) => haystack(one).includes(wanted));
    chooseOne.replaceChildren(...found.map(([one, place]) => {
      const option = make("option", `${one.id}: ${lastLine(one.text).slice(0, 90)}`);
      option.value = String(place);
      return option;
    }));
    at("case-count").textContent = `${found.length} of ${cases.length} examples`;
    show();
  };

  const strip = (one) => {
    const box = make("pre", undefined, "wrap strip");
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", `tokens under ${one.use} at site ${one.site}`);
    one.pieces.forEach((piece, place) => {
      const source = SOURCES[Number(one.sources[place])] || "E";
      const token = make("span", undefined, `t ${source === "E" ? "" : source}`);
      piece.split("\n").forEach((part, index) => {
        if (index) token.append(make("i"), "\n");
        token.append(part);
      });
      token.style.setProperty("--o", (0.15 + 0.006 * one.alphas[place]).toFixed(2));
      token.title = source === "E" ? "E stands" : `${source}, alpha ${(one.alphas[place] / 100).toFixed(2)}`;
      box.append(token);
    });
    return box;
  };

  const answers = (one) => {
    const table = make("table");
    const head = make("tr");
    ["pathway", "answer", "scores"].forEach((name) => {
      const cell = make("th", name, "left");
      cell.scope = "col";
      head.append(cell);
    });
    const rows = one.answers.map((answer) => {
      const row = make("tr");
      const name = make("th", answer.use, "left");
      name.scope = "row";
      const flags = answer.flags.length ? ` [${answer.flags.join(", ")}]` : "";
      row.append(name, make("td", (answer.output || "(empty)") + flags, "left"), make("td", answer.scores, "left"));
      return row;
    });
    table.append(head, ...rows);
    const wide = make("div", undefined, "wide");
    wide.append(table);
    return wide;
  };

  const show = () => {
    const place = at("case");
    if (!chooseOne.options.length) {
      place.replaceChildren(make("p", "No example has these words.", "dim"));
      return;
    }
    const one = sets[Number(chooseSet.value)].cases[Number(chooseOne.value)];
    const parts = [make("h3", "Prompt"), make("pre", one.text, "wrap"), make("p", `Gold: ${one.gold}`), answers(one)];
    if (one.strips.length) {
      const legend = make("p", "A token has the colour of what the router did on reading it, to foretell the next: ", "legend");
      const words = [["E stands", ""], ["GE", "GE"], ["GH", "GH"]];
      words.forEach(([word, kind]) => legend.append(make("span", word, kind), " "));
      legend.append("; the stronger the colour, the larger alpha.");
      parts.push(make("h3", "Token by token"), legend);
      one.strips.forEach((line) => {
        const letIn = [...line.sources].filter((source) => source !== "0").length;
        const title = `${line.use}, site ${line.site}: ${letIn} of ${line.sources.length} tokens admitted`;
        parts.push(make("p", title, "dim"), strip(line));
      });
    } else {
      parts.push(make("p", "No token strip: it needs --trace, and a task that asks one sequence per example.", "dim"));
    }
    place.replaceChildren(...parts);
  };

  const step = (by) => {
    const count = chooseOne.options.length;
    if (!count) return;
    chooseOne.selectedIndex = (chooseOne.selectedIndex + by + count) % count;
    show();
  };

  chooseSet.replaceChildren(...sets.map((one, place) => {
    const option = make("option", one.name);
    option.value = String(place);
    return option;
  }));
  chooseSet.addEventListener("change", list);
  search.addEventListener("input", list);
  chooseOne.addEventListener("change", show);
  at("case-back").addEventListener("click", () => step(-1));
  at("case-next").addEventListener("click", () => step(1));
  at("case-viewer").hidden = false;
  list();
})();

"use strict";

// From the blocks of a case (blocks.py) to elements. Texts of the report are given to `append`, which makes text
// nodes of them: no name or message is ever parsed as markup. Tags and classes are ours.
const blocks = (() => {
  const element = (tag, style, ...children) => {
    const made = document.createElement(tag);
    if (style) made.className = style;
    made.append(...children);
    return made;
  };

  const scrolling = (made) => {
    const frame = element("div", "scroll", made);
    frame.tabIndex = 0;
    return frame;
  };

  const pre = (style, ...children) => {
    const made = element("pre", `message ${style}`, ...children);
    made.tabIndex = 0;
    return made;
  };

  const value = (item) => {
    if (Array.isArray(item)) return element("ul", "", ...item.map((inner) => element("li", "", value(inner))));
    return typeof item === "object" ? facts(item.facts, "nested") : document.createTextNode(item);
  };

  const facts = (pairs, style) => {
    const made = element("dl", style);
    for (const [label, item] of pairs) made.append(element("dt", "", label), element("dd", "", value(item)));
    return made;
  };

  const LONG = 36;

  const table = (heads, rows, marked) => {
    const wrong = new Set(marked);
    const titles = heads.map(([title, style]) => {
      const made = element("th", style, title);
      made.scope = "col";
      return made;
    });
    const lines = rows.map((row, number) => {
      let column = 0;
      const cells = row.map((cell) => {
        const [text, span] = Array.isArray(cell) ? cell : [cell, 1];
        const made = element(column ? "td" : "th", span > 1 ? "" : heads[column][1], text);
        if (!column) made.scope = "row";
        if (!column && text.length > LONG) made.className = "long";
        if (span > 1) made.colSpan = span;
        column += span;
        return made;
      });
      return element("tr", wrong.has(number) ? "differs" : "", ...cells);
    });
    return scrolling(element("table", "", element("thead", "", element("tr", "", ...titles)), element("tbody", "", ...lines)));
  };

  // A plot is XML that matplotlib wrote, names in it escaped; it is parsed as XML, in a document where no script runs.
  const figure = (title, svg) => {
    const drawn = new DOMParser().parseFromString(svg, "image/svg+xml").documentElement;
    return element("figure", "", element("figcaption", "", title), document.importNode(drawn, true));
  };

  const command = (text, label) => {
    const code = element("code", "", text);
    const made = element("p", "command", label, code);
    if (!navigator.clipboard) return made;
    const button = element("button", "copy", "Copy");
    button.type = "button";
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
      }
    });
    made.append(button);
    return made;
  };

  const kinds = {
    h3: (text) => element("h3", "", text),
    h4: (text) => element("h4", "", text),
    headline: (text) => element("pre", "message headline", text),
    // A table of text keeps its columns, prose wraps.
    lines: (lines) => pre("details", ...lines.map(
      (line) => element("span", line.trim().includes("  ") ? "columns" : "", line || "\u200b"))),
    diff: (text) => pre("details", text),
    guilty: (text) => element("p", "guilty", element("strong", "", "Diagnosis:"), ` ${text}`),
    command,
    hint: (text) => element("p", "hint", text),
    value: (item) => element("div", "hint", value(item)),
    cause: (name, text, link) => element(
      "p", "cause", element("strong", "", `Known cause (${name}):`), ` ${text} `, element("span", "hint", link)),
    facts: (pairs, style) => facts(pairs, `facts ${style}`),
    table,
    folded: (summary, inner) => element("details", "", element("summary", "", summary), ...build(inner)),
    beside: (inner) => element("div", "beside", ...build(inner)),
    figures: (inner) => element("div", "figures", ...build(inner)),
    plot: figure,
  };

  const build = (all) => all.map(([kind, ...rest]) => kinds[kind](...rest));

  return { build, element, facts, figure };
})();

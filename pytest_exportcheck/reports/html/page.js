// Beside the matrix, which is markup, the page is data. A case is built when it is opened, a plot when it is seen: all of
// them at once are half a million elements. What is closed is not found by the browser's own search; ours looks into the
// names, messages, details and diagnoses of all cases (`_words` in page.py).
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const by = (id) => document.getElementById(id);
  const data = (id) => JSON.parse(by(id).textContent);
  const form = by("filters");
  const search = by("search");
  const table = by("matrix");
  const panel = by("case");
  const title = by("case-title");

  const index = data("index").map(([name, verdict, kind, fields, words]) => ({
    name, verdict, kind, fields, text: `${name} ${verdict} ${words}`.toLowerCase(),
  }));

  // Line by line, and only that of the case that is opened is parsed.
  let lines = null;
  const details = (number) => {
    lines ??= by("details").textContent.trim().split("\n");
    return JSON.parse(lines[number]);
  };

  // The cells, as they are when the page stands: filters look at no element to find another.
  const numberOf = (link) => Number(link.hash.slice("#case-".length));
  const links = all("a", table);
  const rows = [...table.tBodies[0].rows].map((row) => {
    const cells = [...row.cells].map((cell) => ({ cell, links: all("a", cell) }));
    return { row, cells, hidden: false };
  });
  const [groups, heads] = [...table.tHead.rows].map((row) => [...row.cells]);
  const columnHidden = heads.map(() => false);

  // Filters.

  const chosen = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fields = all("select", form).filter((each) => each.value).map((each) => [Number(each.dataset.at), each.value]);
    const verdicts = new Set(all("input[name=verdict]:checked", form).map((each) => each.value));
    return (entry) => verdicts.has(entry.kind)
      && fields.every(([at, wanted]) => entry.fields[at] === wanted)
      && words.every((word) => entry.text.includes(word));
  };

  const hide = (element, hidden) => {
    if (element.hidden !== hidden) element.hidden = hidden;
  };

  const filter = () => {
    const shown = index.map(chosen());
    const used = new Set([0]);
    for (const row of rows) {
      let any = false;
      row.cells.forEach(({ links: found }, column) => {
        for (const link of found) {
          const visible = shown[numberOf(link)];
          hide(link, !visible);
          if (visible) { any = true; used.add(column); }
        }
      });
      row.hidden = !any;
      hide(row.row, row.hidden);
    }
    heads.forEach((head, column) => {
      const hidden = !used.has(column);
      if (columnHidden[column] === hidden) return;
      columnHidden[column] = hidden;
      head.hidden = hidden;
      for (const { cells } of rows) if (cells[column]) cells[column].cell.hidden = hidden;
    });
    for (const group of groups.slice(1)) {
      const span = heads.filter((head) => head.dataset.group === group.dataset.group && !head.hidden).length;
      hide(group, !span);
      group.colSpan = Math.max(span, 1);
    }
    const count = shown.filter(Boolean).length;
    by("shown").value = `${count} of ${shown.length} tests shown`;
    const nothing = !count && shown.length > 0;
    by("nothing").hidden = !nothing;
    table.parentElement.hidden = nothing;
    steps();
  };

  form.hidden = false;
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(filter));

  // A case. Its address is `#case-12`; nothing has that identifier, so that the matrix stays where it is.

  let open = null;

  const addressed = () => {
    const [, number] = /^#case-(\d+)$/.exec(location.hash) || [];
    return number !== undefined && index[number] ? Number(number) : null;
  };

  const linkOf = (number) => {
    const found = links.filter((link) => numberOf(link) === number);
    return found.find((link) => !link.hidden) || found[0];
  };

  const steps = () => {
    if (open === null) return;
    const order = links.filter((link) => !link.hidden).map(numberOf);
    const at = order.indexOf(open);
    for (const [name, number] of [["previous", order[at - 1]], ["next", order[at + 1]]]) {
      const step = panel.querySelector(`nav .${name}`);
      step.hidden = at < 0 || number === undefined;
      if (!step.hidden) step.href = `#case-${number}`;
    }
  };

  const follow = () => {
    const number = addressed();
    if (number === open) return;
    if (open !== null) linkOf(open)?.removeAttribute("aria-current");
    open = number;
    panel.hidden = number === null;
    document.body.classList.toggle("opened", number !== null);
    if (number === null) {
      by("case-blocks").replaceChildren();
      return;
    }
    const { name, verdict, kind } = index[number];
    title.replaceChildren(`${name} `, blocks.element("span", `verdict ${kind}`, verdict));
    by("case-blocks").replaceChildren(...blocks.build(details(number)));
    linkOf(number)?.setAttribute("aria-current", "true");
    steps();
    panel.scrollTop = 0;
    title.focus({ preventScroll: true });
  };

  const close = () => {
    if (open === null) return;
    const link = linkOf(open);
    location.hash = "all";
    follow();
    (link && !link.hidden ? link : search).focus();
  };

  window.addEventListener("hashchange", follow);
  panel.querySelector(".close").addEventListener("click", (event) => { event.preventDefault(); close(); });

  // Its name, for a pointer that rests on a cell.
  table.addEventListener("pointerover", (event) => {
    const link = event.target.closest("a");
    if (link && !link.title) link.title = index[numberOf(link)].name;
  });

  // Keys.

  const move = (from, key) => {
    const cell = from.closest("td");
    const shown = rows.filter((row) => !row.hidden);
    const at = shown.findIndex(({ row }) => row === cell.parentElement);
    const visible = (found) => found.filter((link) => !link.hidden);
    const down = key === "ArrowDown" ? 1 : key === "ArrowUp" ? -1 : 0;
    if (!down) {
      const inRow = visible(shown[at].cells.flatMap((each) => each.links));
      return inRow[inRow.indexOf(from) + (key === "ArrowRight" ? 1 : -1)] || from;
    }
    for (let next = at + down; shown[next]; next += down) {
      const [link] = visible(shown[next].cells[cell.cellIndex].links);
      if (link) return link;
    }
    return from;
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.closest("input, select, textarea");
    if (event.key === "Escape") {
      close();
    } else if (event.key === "/" && !typing) {
      event.preventDefault();
      close();
      search.focus();
    } else if (event.key.startsWith("Arrow") && event.target.matches("#matrix a")) {
      event.preventDefault();
      move(event.target, event.key).focus();
    }
  });

  // The rest: plots of the run and its environment, when they come into sight.

  const waiting = new Map();
  const fill = (place) => {
    waiting.get(place)?.();
    waiting.delete(place);
    sight.unobserve(place);
  };
  const sight = new IntersectionObserver(
    (seen) => seen.filter((each) => each.isIntersecting).forEach((each) => fill(each.target)), { rootMargin: "300px" },
  );
  const whenSeen = (place, build) => {
    waiting.set(place, build);
    sight.observe(place);
  };
  window.addEventListener("beforeprint", () => [...waiting.keys()].forEach(fill));

  const rest = data("rest");
  by("plots").hidden = !rest.plots.length;
  for (const [name, svg] of rest.plots) {
    const place = blocks.element("figure", "", blocks.element("figcaption", "", name));
    // The room that it will take, or the page would jump.
    const [, , width, height] = /viewBox="([^"]+)"/.exec(svg)[1].split(" ").map(Number);
    const room = blocks.element("div", "room");
    room.style.aspectRatio = `${width} / ${height}`;
    place.append(room);
    by("plots").querySelector(".figures").append(place);
    whenSeen(place, () => place.replaceWith(blocks.figure(name, svg)));
  }
  by("environment").hidden = !rest.environment.length;
  whenSeen(by("environment"), () => by("environment").append(blocks.facts(rest.environment, "facts")));

  const theme = by("theme");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  const label = () => theme.setAttribute("aria-pressed", String(isDark()));
  theme.hidden = false;
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    label();
  });
  dark.addEventListener("change", label);
  label();

  follow();
  filter();
})();

"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const form = document.getElementById("filters");
  const search = document.getElementById("search");
  const table = document.getElementById("matrix");
  const links = all("a[data-case]", table);
  const articles = all("article.case");
  const article = (link) => articles[Number(link.dataset.case)];
  const texts = articles.map((each) => each.dataset.text.toLowerCase());

  // Filters.

  const matches = (number, words, fields, verdicts) => {
    const data = articles[number].dataset;
    return verdicts.has(data.verdict)
      && fields.every(([field, wanted]) => !wanted || data[field] === wanted)
      && words.every((word) => texts[number].includes(word));
  };

  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fields = all("select[data-filter]", form).map((each) => [each.dataset.filter, each.value]);
    const verdicts = new Set(all("input[name=verdict]:checked", form).map((each) => each.value));
    const shown = articles.map((_, number) => matches(number, words, fields, verdicts));
    for (const link of links) link.hidden = !shown[Number(link.dataset.case)];
    const used = new Set();
    for (const row of all("tbody tr", table)) {
      let any = false;
      [...row.cells].forEach((cell, column) => {
        if (cell.querySelector("a:not([hidden])")) { any = true; used.add(column); }
      });
      row.hidden = !any;
    }
    const spans = {};
    const [groups, columns] = table.tHead.rows;
    [...columns.cells].forEach((head, column) => {
      if (!column) return;
      const visible = used.has(column);
      head.hidden = !visible;
      spans[head.dataset.group] = (spans[head.dataset.group] || 0) + visible;
      for (const row of table.tBodies[0].rows) if (row.cells[column]) row.cells[column].hidden = !visible;
    });
    for (const group of all("th", groups)) {
      const span = spans[group.dataset.group] || 0;
      group.hidden = !span;
      group.colSpan = Math.max(span, 1);
    }
    const count = shown.filter(Boolean).length;
    document.getElementById("shown").value = `${count} of ${shown.length} tests shown`;
    steps();
  };

  form.hidden = false;
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(filter));

  // A case.

  const visible = () => links.filter((link) => !link.hidden);
  const open = () => articles.find((each) => each.id === decodeURIComponent(location.hash.slice(1)));

  const steps = () => {
    const current = open();
    if (!current) return;
    const order = visible();
    const at = order.findIndex((link) => article(link) === current);
    for (const [name, link] of [["previous", order[at - 1]], ["next", order[at + 1]]]) {
      const step = current.querySelector(`nav .${name}`);
      step.hidden = at < 0 || !link;
      if (!step.hidden) step.href = link.hash;
    }
  };

  const follow = () => {
    const current = open();
    for (const link of links) {
      if (article(link) === current) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    if (!current) return;
    steps();
    current.scrollTop = 0;
    current.querySelector("h2").focus({ preventScroll: true });
  };

  const close = () => {
    const current = open();
    if (!current) return;
    const link = links.find((each) => article(each) === current && !each.hidden) || search;
    location.hash = "matrix-title";
    link.focus();
  };

  window.addEventListener("hashchange", follow);
  for (const each of all(".case .close")) {
    each.addEventListener("click", (event) => { event.preventDefault(); close(); });
  }
  follow();

  // Keys.

  const move = (from, key) => {
    const cell = from.closest("td");
    const rows = all("tbody tr:not([hidden])", table);
    const down = key === "ArrowDown" ? 1 : key === "ArrowUp" ? -1 : 0;
    if (!down) {
      const inRow = all("a:not([hidden])", cell.parentElement);
      const next = inRow[inRow.indexOf(from) + (key === "ArrowRight" ? 1 : -1)];
      return next || from;
    }
    for (let at = rows.indexOf(cell.parentElement) + down; rows[at]; at += down) {
      const next = rows[at].cells[cell.cellIndex].querySelector("a:not([hidden])");
      if (next) return next;
    }
    return from;
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.closest("input, select, textarea");
    if (event.key === "Escape") {
      if (open()) close();
    } else if (event.key === "/" && !typing) {
      event.preventDefault();
      close();
      search.focus();
    } else if (event.key.startsWith("Arrow") && event.target.matches("a[data-case]")) {
      event.preventDefault();
      move(event.target, event.key).focus();
    }
  });

  // The rest.

  const theme = document.getElementById("theme");
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

  for (const button of all(".copy")) {
    if (!navigator.clipboard) break;
    button.hidden = false;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(button.previousElementSibling.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(button.previousElementSibling);
      }
    });
  }
  filter();
})();

"use strict";
const root = document.documentElement;
const recall = () => { try { return localStorage.getItem("fedlight-theme"); } catch { return null; } };
const keep = theme => { try { localStorage.setItem("fedlight-theme", theme); } catch { /* a page opened from a file may have no storage */ } };
if (recall()) root.dataset.theme = recall();
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  keep(root.dataset.theme);
});

// A line under the pointer stands out against the others, in the legend as in the axes.
for (const svg of document.querySelectorAll(".chart svg")) {
  const series = [...svg.querySelectorAll("[data-series]")];
  const pick = name => {
    svg.classList.toggle("picking", name !== undefined);
    for (const group of series) group.classList.toggle("picked", group.dataset.series === name);
  };
  for (const group of series) {
    group.addEventListener("pointerenter", () => pick(group.dataset.series));
    group.addEventListener("pointerleave", () => pick(undefined));
  }
}

// Tables are sorted by a click on a column's name: numbers by their size, other texts by the alphabet.
const value = (row, column) => row.cells[column].textContent.trim();
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  if (body.rows.length < 2) continue;
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [a, b].map(row => value(row, column));
        const [p, q] = [x, y].map(text => parseFloat(text.replace(/,/g, "")));
        if (isNaN(p) !== isNaN(q)) return isNaN(p) ? 1 : -1;
        const order = isNaN(p) ? x.localeCompare(y) : p - q;
        return down ? -order : order;
      });
      body.append(...rows);
    });
  });
}

// The first lines of a long table, in whichever order it is; without this script all of them are there.
for (const table of document.querySelectorAll("table[data-first]")) {
  const rest = table.tBodies[0].rows.length - table.dataset.first;
  if (rest < 1) continue;
  table.classList.add("shortened");
  const more = document.createElement("button");
  more.type = "button";
  more.className = "more";
  more.textContent = `${rest} more`;
  more.addEventListener("click", () => { table.classList.remove("shortened"); more.remove(); });
  table.parentElement.after(more);
}

// Paper has no folds.
addEventListener("beforeprint", () => {
  for (const fold of document.querySelectorAll("details.example")) fold.open = true;
  for (const more of document.querySelectorAll("button.more")) more.click();
});

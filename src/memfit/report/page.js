// Tooltips and the switch of schemes. The page is complete without this script.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");

  const root = document.documentElement;
  const button = document.getElementById("scheme");
  const isDark = () =>
    root.dataset.scheme ? root.dataset.scheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { button.textContent = isDark() ? button.dataset.light : button.dataset.dark; };
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.scheme = isDark() ? "light" : "dark"; name(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  name();

  const place = (x, y) => {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
    tip.style.left = Math.max(6, Math.min(left, innerWidth - box.width - 6)) + "px";
    tip.style.top = Math.max(6, Math.min(y - box.height / 2, innerHeight - box.height - 6)) + "px";
  };
  const cell = (row, text) => { const made = row.insertCell(); made.textContent = text; return made; };

  // The last event at or before a position: levels hold until the next event.
  const find = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (xs[middle] <= x) low = middle; else high = middle - 1; }
    return low;
  };

  for (const chart of document.querySelectorAll("[data-chart]")) {
    const d = data[chart.dataset.chart];
    const plot = chart.querySelector(".plot"), cursor = chart.querySelector(".cursor");
    const leave = () => { tip.hidden = true; cursor.hidden = true; };
    const show = (event) => {
      const box = plot.getBoundingClientRect();
      const x = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      const at = find(d.x, x);
      cursor.hidden = false;
      cursor.style.left = 100 * x + "%";
      const phase = d.phases.filter((p) => p[0] <= x).pop();
      const table = document.createElement("table");
      if (phase || d.labels) cell(table.insertRow(), d.labels ? d.labels[at] : phase[1]).colSpan = 2;
      for (const s of d.series) {
        if (Number(s.values[at]) === 0) continue;
        const row = table.insertRow(), first = cell(row, ""), swatch = document.createElement("i");
        swatch.className = "swatch";
        swatch.style.backgroundColor = s.colour;
        first.append(swatch, s.name);
        cell(row, s.values[at] + " " + d.unit).className = "n";
      }
      const row = table.insertRow();
      cell(row, d.total.name);
      cell(row, d.total.values[at] + " " + d.unit).className = "n";
      tip.replaceChildren(table);
      place(event.clientX, event.clientY);
    };
    plot.addEventListener("pointermove", show);
    plot.addEventListener("pointerdown", show);
    plot.addEventListener("pointerleave", leave);
  }

  for (const dot of document.querySelectorAll("[data-tip]")) {
    const show = () => {
      const box = dot.getBoundingClientRect();
      tip.textContent = dot.dataset.tip;
      place(box.left + box.width / 2, box.top + box.height / 2);
    };
    const leave = () => { tip.hidden = true; };
    dot.addEventListener("pointerenter", show);
    dot.addEventListener("focus", show);
    dot.addEventListener("pointerleave", leave);
    dot.addEventListener("blur", leave);
  }
})();

// Draws figures when they come into sight, sorts tables, switches tabs and themes, copies text.
window.coterie = (() => {
  "use strict";

  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");
  const darkOf = JSON.parse(document.getElementById("dark-colours").textContent);
  const lowered = new Map(Object.entries(darkOf).map(([k, v]) => [k.toLowerCase(), v]));
  const anyLight = new RegExp([...lowered.keys()].join("|"), "gi");
  const figures = new Map(); // JSON text by the id of the data
  const drawn = new Map(); // what a plot was drawn with, by its element
  const PAPER = { whole: 650, half: 312 }; // pixels between the margins of A4 and Letter
  let printing = false;

  const isDark = () =>
    !printing && (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);

  // --- figures ---------------------------------------------------------------------------------

  function textOf(id) {
    if (!figures.has(id)) {
      const held = document.getElementById(id);
      if (held) figures.set(id, held.textContent);
    }
    return figures.get(id);
  }

  // A figure made for any width, at this one.
  function fitted(figure, width) {
    const { layout } = figure;
    const margin = { l: 48, r: 12, t: 16, b: 44, ...layout.margin };
    let height = layout.height || 420;
    const lying = figure.data.filter((t) => t.colorbar?.orientation === "h" && t.showscale !== false);
    if (lying.length) {
      // Above the plot, from the top of the figure: otherwise plotly.js 4.1 moves the x title, too.
      height += 46 - margin.t;
      margin.t = 62;
      for (const { colorbar } of lying) {
        Object.assign(colorbar, { yref: "container", y: 1, yanchor: "top" });
        colorbar.tickfont = { size: 11 };
        if (width < 520) Object.assign(colorbar, { len: 0.9, x: 1, xanchor: "right", nticks: 4 });
      }
    }
    if (layout.meta?.ends) { // names at the ends of lines, or where there is no room a legend
      const room = width >= 560;
      layout.showlegend = !room;
      if (!room) {
        delete layout.annotations;
        margin.r = 12;
      }
    }
    const square = Object.values(layout).some((axis) => axis?.scaleanchor);
    if (square) height = Math.min(height, width - margin.l - margin.r + margin.t + margin.b + 24);
    layout.font = { ...layout.font, family: getComputedStyle(document.body).fontFamily };
    return { ...layout, margin, height: Math.round(height), width: undefined, autosize: true };
  }

  function widthOf(plot) {
    if (printing) return plot.closest(".half") ? PAPER.half : PAPER.whole;
    return plot.clientWidth;
  }

  function figureFor(plot) {
    let text = textOf(plot.dataset.plot);
    if (!text) return null;
    if (isDark()) text = text.replace(anyLight, (found) => lowered.get(found.toLowerCase()));
    const figure = JSON.parse(text);
    const width = widthOf(plot) || 800;
    const layout = fitted(figure, width);
    if (printing) {
      Object.assign(layout, { width, autosize: false });
      layout.height = Math.min(layout.height, Math.max(300, 0.7 * width));
    }
    layout.uirevision = plot.id; // what a reader zoomed into stays so when more is drawn
    if (coarse.matches) layout.dragmode = false; // a finger scrolls the page
    plot.style.minHeight = `${layout.height}px`;
    return { data: figure.data, layout, width };
  }

  async function drawPlot(plot) {
    const text = textOf(plot.dataset.plot);
    const dark = isDark();
    const before = drawn.get(plot);
    const wide = widthOf(plot);
    if (before && before.text === text && before.dark === dark && before.wide === wide) {
      return before.done;
    }
    const figure = figureFor(plot);
    if (!figure) return null;
    const done = window.Plotly.react(plot, figure.data, figure.layout, {
      displayModeBar: false, displaylogo: false, responsive: false, scrollZoom: false,
      showTips: false,
    });
    drawn.set(plot, { text, dark, wide, done });
    await done;
    plot.dataset.drawn = "";
    return plot;
  }

  const plots = () => [...document.querySelectorAll("[data-plot]")];

  function draw(id) {
    const found = document.getElementById(id);
    const plot = found && (found.matches("[data-plot]") ? found : found.querySelector("[data-plot]"));
    return plot ? drawPlot(plot) : Promise.resolve(null);
  }

  async function drawAll() {
    for (const plot of plots()) await drawPlot(plot);
  }

  const redraw = () => [...drawn.keys()].filter((p) => p.isConnected).forEach(drawPlot);

  const sight = new IntersectionObserver(
    (entries) => entries.filter((e) => e.isIntersecting).forEach((e) => drawPlot(e.target)),
    { rootMargin: "400px" },
  );
  let waiting = 0;
  const widths = new ResizeObserver((entries) => {
    const changed = entries.some((e) => {
      const before = drawn.get(e.target);
      return before && e.target.clientWidth && before.wide !== e.target.clientWidth;
    });
    if (!changed) return;
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      for (const plot of drawn.keys()) if (plot.isConnected && plot.clientWidth) drawPlot(plot);
    }, 120);
  });

  function watchPlots(within) {
    for (const plot of within.querySelectorAll("[data-plot]")) {
      sight.observe(plot);
      widths.observe(plot);
    }
  }

  // --- a live page replaces blocks -------------------------------------------------------------

  // True if there was such a block, or it could be put after the one named.
  function replace(id, html, figure, after) {
    const frame = document.createElement("template");
    frame.innerHTML = html;
    const fresh = frame.content.firstElementChild;
    const old = document.getElementById(id);
    const place = old || document.getElementById(after);
    if (!fresh || !place) return false;
    if (figure) figures.set(`data-${id}`, figure);
    if (old) {
      carryOver(old, fresh);
      old.replaceWith(fresh);
    } else {
      place.after(fresh);
    }
    watchPlots(fresh);
    settleTabs();
    for (const plot of fresh.querySelectorAll("[data-plot]")) if (drawn.has(plot)) drawPlot(plot);
    return true;
  }

  // What a reader has opened, sorted or drawn stays so.
  function carryOver(old, fresh) {
    for (const open of old.querySelectorAll("details[open][data-keep]")) {
      const same = fresh.querySelector(`details[data-keep="${open.dataset.keep}"]`);
      if (same) same.open = true;
    }
    const sorted = [...old.querySelectorAll("table")].map((t) => t.querySelector("th[aria-sort]"));
    [...fresh.querySelectorAll("table")].forEach((table, i) => {
      if (!sorted[i]) return;
      const head = table.tHead.rows[0].cells[sorted[i].cellIndex];
      if (head) sortBy(head, sorted[i].getAttribute("aria-sort"));
    });
    const [before, now] = [old, fresh].map((each) => each.querySelector("[data-plot]"));
    if (before && now && drawn.has(before)) {
      before.setAttribute("aria-label", now.getAttribute("aria-label"));
      now.replaceWith(before);
    }
  }

  // --- tables ----------------------------------------------------------------------------------

  function valueOf(row, column) {
    const cell = row.cells[column];
    const told = cell.dataset.sort ?? cell.textContent.trim();
    const number = Number(told);
    return told === "" || told === "–" ? null : Number.isNaN(number) ? told : number;
  }

  function compared(a, b) {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  }

  function sortBy(head, direction) {
    const body = head.closest("table").tBodies[0];
    const sign = direction === "ascending" ? 1 : -1;
    const rows = [...body.rows].map((row) => [valueOf(row, head.cellIndex), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null); // what is missing goes last
      return sign * compared(a, b);
    });
    body.append(...rows.map(([, row]) => row));
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", direction);
  }

  // --- tabs ------------------------------------------------------------------------------------

  function select(tab, focus) {
    const tabs = [...tab.parentElement.querySelectorAll('[role="tab"]')];
    for (const each of tabs) {
      const chosen = each === tab;
      each.setAttribute("aria-selected", String(chosen));
      each.tabIndex = chosen ? 0 : -1;
    }
    settleTabs();
    if (focus) tab.focus();
  }

  function settleTabs() {
    for (const tab of document.querySelectorAll('[role="tab"]')) {
      const panel = document.getElementById(tab.getAttribute("aria-controls"));
      if (panel) panel.hidden = tab.getAttribute("aria-selected") !== "true";
    }
  }

  function onKey(event) {
    const tab = event.target.closest?.('[role="tab"]');
    if (!tab) return;
    const tabs = [...tab.parentElement.querySelectorAll('[role="tab"]')];
    const at = tabs.indexOf(tab);
    const to = {
      ArrowRight: (at + 1) % tabs.length, ArrowLeft: (at - 1 + tabs.length) % tabs.length,
      Home: 0, End: tabs.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    select(tabs[to], true);
  }

  // --- buttons ---------------------------------------------------------------------------------

  function theme(name) {
    root.dataset.theme = name;
    try {
      localStorage.setItem("coterie-theme", name);
    } catch {
      // it lasts as long as the page, then
    }
    showTheme();
  }

  function showTheme() {
    const button = document.getElementById("theme");
    if (button) button.textContent = isDark() ? "Light" : "Dark"; // what it changes the page to
    redraw();
  }

  async function copy(button) {
    const text = button.parentElement.querySelector("code").textContent;
    try {
      await navigator.clipboard.writeText(text);
      said(button, "Copied");
    } catch {
      getSelection().selectAllChildren(button.parentElement.querySelector("code"));
      said(button, "Selected");
    }
  }

  function said(button, word) {
    button.textContent = word;
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }

  async function save(button) {
    const plot = document.getElementById(button.dataset.save);
    await drawPlot(plot);
    const filename = plot.id.replace(/^plot-/, "");
    const size = { width: plot.clientWidth || 900, height: plot.clientHeight || 500 };
    await window.Plotly.downloadImage(plot, { format: "svg", filename, ...size });
  }

  function onClick(event) {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.id === "theme") theme(isDark() ? "light" : "dark");
    else if (button.matches('[role="tab"]')) select(button, false);
    else if (button.matches(".copy")) copy(button);
    else if (button.matches("[data-save]")) save(button);
    else if (button.matches(".sort")) {
      const head = button.closest("th");
      sortBy(head, head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending");
    }
  }

  function reveal() {
    let hidden = null;
    try {
      hidden = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    } catch {
      return; // no id of ours
    }
    for (let at = hidden; at; at = at.parentElement) if (at.matches("details")) at.open = true;
    const tab = hidden?.matches('[role="tabpanel"]') && document.getElementById(`tab-${hidden.id}`);
    if (tab) select(tab, false);
    hidden?.scrollIntoView();
  }

  // On paper everything is open, drawn and light, but for runs that are folded.
  const opened = [];
  function beforePrint() {
    printing = true;
    for (const each of document.querySelectorAll("details:not([open], .run, .glossary, [data-keep=shared])")) {
      each.open = true;
      opened.push(each);
    }
    for (const panel of document.querySelectorAll('[role="tabpanel"]')) panel.hidden = false;
    plots().filter((plot) => !plot.closest("details:not([open])")).forEach(drawPlot);
  }

  function afterPrint() {
    printing = false;
    opened.splice(0).forEach((each) => { each.open = false; });
    settleTabs();
    redraw();
  }

  document.addEventListener("click", onClick);
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", reveal);
  addEventListener("beforeprint", beforePrint);
  addEventListener("afterprint", afterPrint);
  prefersDark.addEventListener("change", showTheme);
  settleTabs();
  showTheme();
  watchPlots(document);
  if (location.hash) reveal();

  return { draw, drawAll, replace, theme };
})();

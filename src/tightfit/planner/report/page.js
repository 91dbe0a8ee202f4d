"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const darkness = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia("(max-width: 620px)");

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(count) >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return (unit ? count.toFixed(2) : count.toFixed(0)) + " " + units[unit];
}

function seconds(value) {
  if (value < 1e-3) return (value * 1e6).toFixed(1) + " µs";
  return value < 1 ? (value * 1e3).toFixed(1) + " ms" : value.toFixed(2) + " s";
}

function escaped(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

/* A long module path in lines that a phone can show. */
function folded(text, width = 34) {
  const lines = [];
  for (let rest = text; rest.length; ) {
    const gap = Math.max(rest.lastIndexOf(".", width), rest.lastIndexOf(" ", width));
    const cut = rest.length <= width ? rest.length : gap > 0 ? gap : width;
    lines.push(escaped(rest.slice(0, cut)));
    rest = rest.slice(cut);
  }
  return lines.join("<br>");
}

function layout() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"), fixedrange: narrow.matches };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    dragmode: narrow.matches ? false : "zoom",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--ink") },
    hoverlabel: { align: "left", bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink"), size: 12 } },
    margin: { l: 8, r: 8, t: 28, b: 44 },
    xaxis: { ...axis, automargin: true }, yaxis: { ...axis, automargin: true, rangemode: "tozero" },
  };
}

const config = { responsive: true, displayModeBar: false, doubleClick: "reset" };

/* Runs of one phase: [phase, first point, one past the last]. */
function runs(phases) {
  const found = [];
  phases.forEach((phase, at) => {
    if (found.length && found[found.length - 1][0] === phase) found[found.length - 1][2] = at + 1;
    else found.push([phase, at, at + 1]);
  });
  return found;
}

function timeline(id, step, highest) {
  const unit = highest >= 2 ** 30 ? ["GiB", 2 ** 30] : ["MiB", 2 ** 20];
  const shown = data.categories.filter((category) => (step.timeline[category] || []).some((size) => size > 0));
  const count = step.phases.length;
  const totals = Array.from({ length: count }, (_, at) => shown.reduce((sum, c) => sum + step.timeline[c][at], 0));
  const traces = shown.map((category) => ({
    type: "scatter", mode: "lines", stackgroup: "memory", name: category, hoverinfo: "skip",
    line: { width: 0, shape: "hv" }, fillcolor: data.colours[category],
    y: step.timeline[category].map((size) => size / unit[1]),
  }));
  const base = layout();
  traces.push({
    type: "scatter", mode: "lines", name: "total", line: { width: 1, shape: "hv", color: base.font.color },
    y: totals.map((size) => size / unit[1]),
    text: totals.map((total, at) => [
      "<b>" + bytes(total) + "</b> in " + step.phases[at],
      folded((step.modules[at] || "top level") + " · " + step.operators[at]),
      ...[...shown].reverse().filter((c) => step.timeline[c][at] > 0).map((c) => c + " " + bytes(step.timeline[c][at])),
    ].join("<br>")),
    hovertemplate: "%{text}<extra></extra>",
  });
  if (step.measured) {
    const at = totals.indexOf(Math.max(...totals));
    traces.push({
      type: "scatter", mode: "markers", x: [at], y: [step.measured / unit[1]], name: "measured peak",
      marker: { size: 11, color: base.font.color, line: { color: base.hoverlabel.bgcolor, width: 2 } },
      hovertemplate: "measured peak " + bytes(step.measured) + "<extra></extra>",
    });
  }
  const tint = { recompute: data.recompute_tint, backward: "rgba(128,134,150,0.16)" };
  const bands = runs(step.phases);
  const shapes = bands.filter(([phase]) => tint[phase]).map(([phase, first, last]) => ({
    type: "rect", layer: "below", xref: "x", yref: "paper", x0: first, x1: last, y0: 0, y1: 1, line: { width: 0 }, fillcolor: tint[phase],
  }));
  const annotations = [];
  for (const name of new Set(step.phases)) {
    /* Recompute comes in short runs between those of backward, which goes by one name all the same. */
    const own = bands.filter(([phase]) => phase === name);
    const [first, last] = name === "backward" ? [own[0][1], own[own.length - 1][2]] : own.map((band) => band.slice(1)).reduce((a, b) => (b[1] - b[0] > a[1] - a[0] ? b : a));
    if (name === "recompute" || last - first < 0.12 * count) continue;
    annotations.push({ text: name, x: (first + last) / 2, y: 1.02, xref: "x", yref: "paper", yanchor: "bottom", showarrow: false });
  }
  if (data.budget) {
    shapes.push({
      type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: data.budget / unit[1], y1: data.budget / unit[1],
      line: { color: data.budget_colour, width: 2, dash: "dash" },
    });
  }
  base.hoverdistance = -1;
  base.xaxis = { ...base.xaxis, range: [0, count - 1], showticklabels: false, showgrid: false, title: { text: "operators of one step, in order" } };
  base.yaxis = { ...base.yaxis, range: [0, (1.06 * highest) / unit[1]], ticksuffix: " " + unit[0] };
  Plotly.react(id, traces, { ...base, shapes, annotations }, config);
}

function curve(id) {
  const all = data.points.concat(data.recipes);
  const highest = Math.max(...all.map((point) => point.peak_bytes));
  const lowest = Math.min(...all.map((point) => point.peak_bytes));
  const unit = highest >= 2 ** 30 ? ["GiB", 2 ** 30] : ["MiB", 2 ** 20];
  const plain = (data.recipes[0] || data.points[0]).step_seconds || 1;
  const place = (points) => ({ x: points.map((p) => p.peak_bytes / unit[1]), y: points.map((p) => p.step_seconds / plain) });
  const told = (points) => points.map((p) => [
    folded(p.levers), "<b>" + bytes(p.peak_bytes) + "</b>", seconds(p.step_seconds) + " (" + (p.step_seconds / plain).toFixed(3) + "x of plain)",
  ].join("<br>"));
  const base = layout();
  const traces = [{
    type: "scatter", mode: "lines+markers", ...place(data.points), text: told(data.points), hovertemplate: "%{text}<extra></extra>",
    line: { color: data.curve_colour, width: 2 }, marker: { size: 8, color: data.curve_colour },
  }];
  data.recipes.forEach((recipe, at) => traces.push({
    type: "scatter", mode: "markers", ...place([recipe]), text: told([recipe]), hovertemplate: "%{text}<extra></extra>",
    marker: { size: 13, symbol: data.recipe_symbols[at], color: data.recipe_colours[at], line: { width: 1.5, color: base.font.color } },
  }));
  const chosen = data.points.filter((point) => point.peak_bytes === data.chosen);
  if (chosen.length) traces.push({
    type: "scatter", mode: "markers", ...place(chosen), text: told(chosen), hovertemplate: "<b>this plan</b><br>%{text}<extra></extra>",
    marker: { size: 18, symbol: "star", color: data.budget_colour, line: { width: 1, color: base.hoverlabel.bgcolor } },
  });
  if (data.budget) base.shapes = [{
    type: "line", xref: "x", yref: "paper", x0: data.budget / unit[1], x1: data.budget / unit[1], y0: 0, y1: 1,
    line: { color: data.budget_colour, width: 2, dash: "dash" },
  }];
  const slowest = Math.max(...all.map((point) => point.step_seconds)) / plain;
  const fastest = Math.min(...all.map((point) => point.step_seconds)) / plain;
  const room = 0.08 * (slowest - fastest) + 0.005;
  base.xaxis = { ...base.xaxis, range: [(lowest - 0.06 * (highest - lowest)) / unit[1], (highest + 0.06 * (highest - lowest)) / unit[1]], rangemode: "normal", ticksuffix: " " + unit[0], title: { text: "peak memory" }, nticks: narrow.matches ? 5 : 10 };
  base.yaxis = { ...base.yaxis, rangemode: "normal", range: [fastest - room, slowest + room], ticksuffix: "x", title: { text: "step time, of plain" } };
  Plotly.react(id, traces, base, config);
}

function draw() {
  const highest = Math.max(data.budget || 0, ...data.steps.map((step) => Math.max(step.peak, step.measured || 0)));
  data.steps.forEach((step, at) => timeline("step-" + at, step, highest));
  if (data.points.length) curve("curve");
}

draw();
darkness.addEventListener("change", draw);
narrow.addEventListener("change", draw);

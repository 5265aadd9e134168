"use strict";
const content = JSON.parse(document.getElementById("content").textContent);
const { summary, ranks } = content;

// Python writes nanoseconds, and tuples as arrays; the page draws microseconds.
const us = (ns) => ns / 1e3;
for (const rank of ranks) {
  rank.steps = rank.intervals.map((ends) => ends.map(us));
  rank.memory = rank.memory.map(([time, live, reserved]) =>
    reserved === null ? [us(time), live] : [us(time), live, reserved]);
  for (const lane of rank.lanes) {
    lane.items = lane.spans.map(([kind, name, start, end, op, , late, lateRank]) =>
      [kind, name, us(start), us(end), op, us(late), lateRank]);
  }
}

// By what a rank does, and by what is under way.
const colors = {
  forward: "#3b82f6",
  backward: "#8b5cf6",
  optimizer: "#10b981",
  launch: "#94a3b8",
  copy: "#64748b",
  wait: "#ef4444",
  gather: "#06b6d4",
  regather: "#22d3ee",
  reduce: "#f59e0b",
  "all-reduce": "#d97706",
};
const words = {
  forward: "forward",
  backward: "backward",
  optimizer: "optimizer",
  launch: "launch",
  copy: "copy",
  wait: "exposed wait",
  gather: "all-gather",
  regather: "all-gather of kept parts",
  reduce: "reduce-scatter",
  "all-reduce": "all-reduce",
};
// Of the memory curves; the ninth rank has the color of the first again.
const rankColors = [
  "#0ea5e9", "#f97316", "#22c55e", "#e11d48", "#a855f7", "#eab308", "#14b8a6", "#64748b",
];
const find = (id) => document.getElementById(id);
const make = (tag, text = "", look = {}) => {
  const one = document.createElement(tag);
  one.textContent = text;
  Object.assign(one.style, look);
  return one;
};

// Words -----------------------------------------------------------------------------------

const ms = (value) => `${value.toFixed(value < 10 ? 2 : 1)} ms`;
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
const duration = (us) => (us < 1000 ? `${us.toFixed(1)} µs` : ms(us / 1000));
function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(4, Math.floor(Math.log2(Math.max(count, 1)) / 10));
  return `${(count / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}
const colorOfRank = (rank) => rankColors[rank % rankColors.length];

// What is there ----------------------------------------------------------------------------

const first = Math.min(...ranks.map((rank) => rank.steps[0][0]));
const last = Math.max(...ranks.map((rank) => rank.steps.at(-1)[1]));
const HEIGHT = { compute: 24, waits: 11, gathers: 11, reductions: 11 };
const LEFT = 118, RIGHT = 12, TOP = 24, GAP = 3, RANK_GAP = 18, MEMORY = 150, MEMORY_TOP = 34;
const rows = [];
let bottom = TOP;
for (const rank of ranks) {
  const top = bottom;
  for (const lane of rank.lanes) {
    rows.push({ rank, lane, top: bottom, height: HEIGHT[lane.kind], rankTop: top });
    bottom += HEIGHT[lane.kind] + GAP;
  }
  rank.top = top;
  rank.bottom = bottom - GAP;
  bottom += RANK_GAP;
}
const hidden = new Set();
const lanes = find("lanes"), memory = find("memory"), chart = find("chart"), tip = find("tip");
let view = [first, last];
let width = 800;

const x = (time) => LEFT + ((time - view[0]) / (view[1] - view[0])) * (width - LEFT - RIGHT);
const timeAt = (px) => view[0] + ((px - LEFT) / (width - LEFT - RIGHT)) * (view[1] - view[0]);

// Drawing ----------------------------------------------------------------------------------

function sized(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "11.5px ui-sans-serif, system-ui, sans-serif";
  pen.textBaseline = "middle";
  return pen;
}
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function niceStep(span, count) {
  const power = 10 ** Math.floor(Math.log10(span / count));
  return power * [1, 2, 5, 10].find((factor) => power * factor >= span / count);
}
function ticks(pen, height, labelled) {
  const step = niceStep(view[1] - view[0], Math.max(3, (width - LEFT) / 110));
  pen.lineWidth = 1;
  for (let at = Math.ceil((view[0] - first) / step) * step; first + at <= view[1]; at += step) {
    const px = Math.round(x(first + at)) + 0.5;
    pen.strokeStyle = variable("--grid");
    pen.beginPath(); pen.moveTo(px, labelled ? 18 : MEMORY_TOP); pen.lineTo(px, height); pen.stroke();
    if (!labelled) continue;
    pen.fillStyle = variable("--soft");
    pen.textAlign = "center";
    pen.fillText(step < 1 ? `${at.toFixed(2)} µs` : step < 1000 ? `${Math.round(at)} µs`
      : `${+(at / 1000).toFixed(2)} ms`, px, 8);
  }
}
function bar(pen, left, top, wide, high) {
  const radius = Math.min(3, wide / 3, high / 3);
  pen.beginPath();
  if (radius > 0.7) pen.roundRect(left, top, wide, high, radius); else pen.rect(left, top, wide, high);
  pen.fill();
}
function fitting(pen, name, wide) {
  return [name, name.split(".").at(-1)].find((text) => pen.measureText(text).width <= wide) ?? "";
}
function drawLanes() {
  const pen = sized(lanes, bottom - RANK_GAP + 6);
  for (const row of rows) {
    pen.fillStyle = variable("--lane");
    pen.fillRect(LEFT, row.top, width - LEFT - RIGHT, row.height);
  }
  ticks(pen, bottom - RANK_GAP, true);
  pen.save();
  pen.beginPath(); pen.rect(LEFT, 0, width - LEFT - RIGHT, bottom); pen.clip();
  for (const row of rows) {
    for (const item of row.lane.items) {
      const [kind, name, start, end] = item;
      if (end < view[0] || start > view[1] || hidden.has(kind)) continue;
      const left = Math.max(x(start), LEFT - 4), wide = Math.max(x(end) - left, 0.6);
      if (kind === "wait") {
        pen.fillStyle = `${colors.wait}1c`;
        pen.fillRect(left, row.rank.top, wide, row.rank.bottom - row.rank.top);
      }
      pen.fillStyle = colors[kind];
      bar(pen, left, row.top, Math.min(wide, width), row.height);
      const inside = Math.min(left + wide, width - RIGHT) - left;
      if (row.lane.kind === "compute" && inside > 14 && kind !== "launch" && kind !== "copy") {
        const text = fitting(pen, name || "root", inside - 8);
        pen.fillStyle = "#fff";
        pen.textAlign = "center";
        if (text) pen.fillText(text, left + inside / 2, row.top + row.height / 2 + 0.5);
      }
    }
  }
  pen.restore();
  for (const row of rows) {
    pen.textAlign = "right";
    pen.fillStyle = variable("--soft");
    const title = row.lane.kind === "waits" ? "waits" : row.lane.title;
    if (row.lane.kind !== "compute") pen.fillText(title, LEFT - 8, row.top + row.height / 2);
  }
  pen.textAlign = "left";
  pen.font = "600 13px ui-sans-serif, system-ui, sans-serif";
  pen.fillStyle = variable("--text");
  for (const rank of ranks) pen.fillText(`rank ${rank.rank}`, 0, rank.top + 12);
}
function inView(samples) {
  const inside = [];
  let before = null;
  for (const sample of samples) {
    if (sample[0] < view[0]) before = sample;
    else if (sample[0] <= view[1]) inside.push(sample);
  }
  return before ? [[view[0], ...before.slice(1)], ...inside] : inside;
}
function stairs(pen, curve, end, heightOf) {
  pen.beginPath();
  pen.moveTo(x(curve[0][0]), heightOf(curve[0]));
  for (let i = 1; i < curve.length; i++) {
    pen.lineTo(x(curve[i][0]), heightOf(curve[i - 1]));
    pen.lineTo(x(curve[i][0]), heightOf(curve[i]));
  }
  pen.lineTo(end, heightOf(curve.at(-1)));
}
function drawMemory() {
  const curves = ranks.map((rank) => inView(rank.memory));
  const values = curves.flat().map((sample) => Math.max(...sample.slice(1)) / 2 ** 20);
  if (!values.length) { memory.style.height = 0; return; }
  const pen = sized(memory, MEMORY + MEMORY_TOP + 8);
  const most = values.reduce((a, b) => Math.max(a, b));
  const step = niceStep(Math.max(most, 1e-6), 4);
  const high = (Math.floor(most / step) + 1) * step;
  const y = (nbytes) => MEMORY_TOP + MEMORY * (1 - nbytes / 2 ** 20 / high);
  ticks(pen, MEMORY + MEMORY_TOP, false);
  pen.strokeStyle = variable("--grid");
  for (let level = 0; level <= high + step / 2; level += step) {
    const py = Math.round(y(level * 2 ** 20)) + 0.5;
    pen.beginPath(); pen.moveTo(LEFT, py); pen.lineTo(width - RIGHT, py); pen.stroke();
    pen.fillStyle = variable("--soft");
    pen.textAlign = "right";
    pen.fillText(bytes(level * 2 ** 20), LEFT - 8, py);
  }
  curves.forEach((curve, index) => {
    if (!curve.length) return;
    const end = Math.min(x(last), width - RIGHT);
    pen.strokeStyle = colorOfRank(ranks[index].rank);
    if (curve[0].length > 2) {
      pen.lineWidth = 1;
      pen.setLineDash([4, 3]);
      stairs(pen, curve, end, (sample) => y(sample[2]));
      pen.stroke();
      pen.setLineDash([]);
    }
    pen.lineWidth = 1.6;
    stairs(pen, curve, end, (sample) => y(sample[1]));
    pen.stroke();
    pen.lineTo(end, y(0));
    pen.lineTo(x(curve[0][0]), y(0));
    pen.fillStyle = `${colorOfRank(ranks[index].rank)}14`;
    pen.fill();
  });
  pen.textAlign = "left";
  pen.font = "600 13px ui-sans-serif, system-ui, sans-serif";
  pen.fillStyle = variable("--text");
  pen.fillText("live memory", 0, 12);
  if (summary.peak_reserved_nbytes) {
    pen.font = "11.5px ui-sans-serif, system-ui, sans-serif";
    pen.fillText("dashed: reserved", 0, 27);
  }
  pen.font = "11.5px ui-sans-serif, system-ui, sans-serif";
  ranks.slice(0, 8).forEach((rank, index) => {
    pen.fillStyle = colorOfRank(rank.rank);
    pen.fillRect(LEFT + 66 * index, 11, 12, 3);
    pen.fillStyle = variable("--soft");
    pen.fillText(`rank ${rank.rank}`, LEFT + 66 * index + 17, 13);
  });
}
function savePicture() {
  const picture = document.createElement("canvas");
  picture.width = lanes.width;
  picture.height = lanes.height + memory.height;
  const pen = picture.getContext("2d");
  pen.fillStyle = variable("--panel");
  pen.fillRect(0, 0, picture.width, picture.height);
  pen.drawImage(lanes, 0, 0);
  if (memory.clientHeight) pen.drawImage(memory, 0, lanes.height);
  const link = document.createElement("a");
  link.download = "timeline.png";
  link.href = picture.toDataURL();
  link.click();
}
let isDue = false;
function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => { isDue = false; drawLanes(); drawMemory(); });
}

// Moving -----------------------------------------------------------------------------------

function show(start, end) {
  const least = Math.min(2, last - first), span = Math.min(Math.max(end - start, least), last - first);
  start = Math.min(Math.max((start + end - span) / 2, first), last - span);
  view = [start, start + span];
  draw();
}
function zoom(factor, around = (view[0] + view[1]) / 2) {
  show(around - (around - view[0]) * factor, around + (view[1] - around) * factor);
}
const pan = (share) => {
  const by = Math.min(Math.max(share * (view[1] - view[0]), first - view[0]), last - view[1]);
  show(view[0] + by, view[1] + by);
};
const fit = () => show(first, last);
find("in").onclick = () => zoom(0.6);
find("out").onclick = () => zoom(1 / 0.6);
find("save").onclick = savePicture;
find("fit").onclick = () => { find("steps").value = "all"; fit(); };
chart.addEventListener("wheel", (event) => {
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    zoom(Math.exp(event.deltaY * 0.004), timeAt(event.clientX - chart.getBoundingClientRect().left));
  } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    event.preventDefault();
    pan((event.deltaX || event.deltaY) / width);
  }
}, { passive: false });
document.addEventListener("keydown", (event) => {
  if (event.target.tagName === "SELECT" || event.ctrlKey || event.metaKey || event.altKey) return;
  const act = {
    w: () => zoom(0.7), s: () => zoom(1 / 0.7), a: () => pan(-0.15), d: () => pan(0.15), 0: fit,
    "+": () => zoom(0.7), "-": () => zoom(1 / 0.7), ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
  }[event.key];
  if (act) { event.preventDefault(); act(); }
});
let grip = null;
chart.addEventListener("pointerdown", (event) => {
  grip = { at: event.clientX, view: [...view] };
  chart.setPointerCapture(event.pointerId);
});
chart.addEventListener("pointerup", () => { grip = null; });
chart.addEventListener("pointerleave", () => { tip.hidden = find("cursor").hidden = true; });
chart.addEventListener("pointermove", (event) => {
  const box = chart.getBoundingClientRect();
  if (grip) {
    const span = grip.view[1] - grip.view[0];
    const by = ((grip.at - event.clientX) / (width - LEFT - RIGHT)) * span;
    const start = Math.min(Math.max(grip.view[0] + by, first), last - span);
    show(start, start + span);
  }
  hover(event.clientX - box.left, event.clientY - box.top);
});
chart.addEventListener("dblclick", (event) => {
  const box = chart.getBoundingClientRect();
  const hit = itemAt(event.clientX - box.left, event.clientY - box.top);
  if (hit) show(hit.item[2] - 0.1 * (hit.item[3] - hit.item[2]), hit.item[3] + 0.1 * (hit.item[3] - hit.item[2]));
});

// Asking -----------------------------------------------------------------------------------

function itemAt(px, py) {
  const row = rows.find((one) => py >= one.top - 1 && py <= one.top + one.height + 1);
  if (!row || px < LEFT) return null;
  let best = null, nearest = 3;
  for (const item of row.lane.items) {
    if (hidden.has(item[0])) continue;
    const away = Math.max(x(item[2]) - px, px - x(item[3]), 0);
    if (away < nearest) { nearest = away; best = item; }
  }
  return best && { item: best, row };
}
function hover(px, py) {
  const cursor = find("cursor");
  cursor.hidden = px < LEFT || px > width - RIGHT;
  cursor.style.left = `${px}px`;
  const hit = itemAt(px, py);
  tip.replaceChildren();
  if (hit) {
    const [kind, name, start, end, op, late, lateRank] = hit.item;
    const what = kind === "wait" && op === "copies" ? "exposed wait: copies between host and device"
      : op && op !== kind ? `${words[kind]}: ${words[op] ?? op}` : words[kind];
    tip.append(make("b", name || (op === "copies" ? "end of a pass" : "root")), make("span", what));
    tip.append(make("span", `${duration(end - start)} at ${duration(start - first)}, rank ${hit.row.rank.rank}`));
    if (late > 0) tip.append(make("span", `of it ${duration(late)} until rank ${lateRank} launched`));
    const [nbytes] = hit.row.rank.groups[name] ?? [0];
    if (op && nbytes) tip.append(make("span", `${bytes(nbytes)} unsharded`));
  } else if (py > lanes.clientHeight && px > LEFT) {
    const time = timeAt(px);
    tip.append(make("b", `at ${duration(time - first)}`));
    for (const rank of ranks.slice(0, 12)) {
      const sample = rank.memory.findLast((one) => one[0] <= time);
      if (!sample) continue;
      const reserved = sample.length > 2 ? ` of ${bytes(sample[2])} reserved` : "";
      tip.append(make("span", `rank ${rank.rank}: ${bytes(sample[1])}${reserved}`));
    }
  }
  tip.hidden = !tip.childElementCount;
  tip.style.left = `${Math.min(px + 14, width - tip.offsetWidth - 4)}px`;
  tip.style.top = `${py + 16}px`;
}

// Around -----------------------------------------------------------------------------------

function cards() {
  const computeShare = summary.compute_ms / summary.step_ms;
  const all = [
    ["step, mean", ms(summary.step_ms), 1, colors.forward],
    [`compute: ${percent(computeShare)} of the step`, ms(summary.compute_ms), computeShare, colors.backward],
    [`exposed communication: ${percent(summary.exposed_share)} of the step`, ms(summary.exposed_ms),
      summary.exposed_share, colors.wait],
    [`of the communication (${ms(summary.communication_ms)}) hidden behind compute`,
      percent(summary.hidden_share), summary.hidden_share, colors.gather],
    [`peak memory of a rank${summary.peak_reserved_nbytes ? `; reserved: ${bytes(summary.peak_reserved_nbytes)}` : ""}`,
      summary.peak_nbytes ? bytes(summary.peak_nbytes) : "–", 0, colors.optimizer],
  ];
  for (const [title, value, share, color] of all) {
    const card = make("div");
    card.className = "card";
    const fill = make("u", "", { width: `${100 * Math.min(share, 1)}%`, background: color });
    const track = make("i");
    track.append(fill);
    card.append(make("b", value), make("span", title), track);
    card.title = title;
    find("cards").append(card);
  }
}
function table() {
  const titles = ["rank", "step", "", "forward", "backward", "optimizer", "launch", "copy",
    "exposed (of the step)", "of it late", "other", "peak memory",
    ...(summary.peak_reserved_nbytes ? ["peak reserved"] : [])];
  const head = make("tr");
  titles.forEach((title) => head.append(make("th", title)));
  find("table").append(head);
  for (const rank of summary.ranks) {
    const row = make("tr"), mix = make("td"), strip = make("div");
    mix.className = "mix";
    for (const kind of ["forward", "backward", "optimizer", "launch", "copy", "exposed"]) {
      const part = make("span", "", {
        width: `${(100 * rank[`${kind}_ms`]) / rank.step_ms}%`, background: colors[kind === "exposed" ? "wait" : kind],
      });
      part.title = `${kind}: ${ms(rank[`${kind}_ms`])}`;
      strip.append(part);
    }
    mix.append(strip);
    row.append(make("td", rank.rank), make("td", ms(rank.step_ms)), mix);
    for (const kind of ["forward", "backward", "optimizer", "launch", "copy"]) row.append(make("td", ms(rank[`${kind}_ms`])));
    row.append(make("td", `${ms(rank.exposed_ms)} (${percent(rank.exposed_share)})`));
    row.append(make("td", ms(rank.late_ms)), make("td", ms(rank.other_ms)));
    row.append(make("td", rank.peak_nbytes ? bytes(rank.peak_nbytes) : "–"));
    if (summary.peak_reserved_nbytes) row.append(make("td", bytes(rank.peak_reserved_nbytes)));
    find("table").append(row);
  }
}
function legend() {
  const used = new Set(rows.flatMap((row) => row.lane.items.map((item) => item[0])));
  for (const kind of Object.keys(colors).filter((one) => used.has(one))) {
    const button = make("button");
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.append(make("em", "", { background: colors[kind] }), words[kind]);
    button.onclick = () => {
      if (!hidden.delete(kind)) hidden.add(kind);
      button.setAttribute("aria-pressed", String(!hidden.has(kind)));
      draw();
    };
    find("legend").append(button);
  }
}
function steps() {
  const select = find("steps");
  select.append(new Option("all steps", "all"));
  if (summary.num_steps) {
    for (let i = 0; i < summary.num_steps; i++) select.append(new Option(`step ${summary.first_step + i}`, i));
  }
  select.onchange = () => {
    if (select.value === "all") return fit();
    const spans = ranks.map((rank) => rank.steps[Number(select.value)]);
    show(Math.min(...spans.map((one) => one[0])), Math.max(...spans.map((one) => one[1])));
  };
  select.hidden = !summary.num_steps;
  if (summary.num_steps > 1) { select.value = summary.num_steps - 1; select.onchange(); }
}
function notes() {
  const count = summary.num_steps;
  find("lead").textContent = [
    `${summary.ranks.length} rank${summary.ranks.length > 1 ? "s" : ""} on ${[...new Set(ranks.map((rank) => rank.device.split(":")[0]))]}`,
    ...(ranks.length < summary.ranks.length ? [`lanes of the first ${ranks.length}`] : []),
    count ? `${count} step${count > 1 ? "s" : ""} from step ${summary.first_step}` : "no steps marked",
  ].join(" · ");
  const of = { heap: "what the C library's heap has handed out",
    device: "what the device's allocator has handed out" }[summary.memory_of];
  find("notes").textContent = "Exposed: the rank waits for communication and computes nothing. Late: of that, until the "
    + "last rank had launched its part. Launch and copy: putting together what is sent, and what came to its place. "
    + "Other: what nothing is known of, such as the loss and the next batch. "
    + (of ? `Memory: ${of}, asked at each event. ` : "")
    + (summary.num_clocks > 1 ? `The clocks of ${summary.num_clocks} hosts were put on one scale`
      + (summary.clock_error_ms === null ? " by their wall clocks." : `, at most ${ms(summary.clock_error_ms)} off.`) : "");
  if (summary.missing_ranks.length) {
    find("warning").hidden = false;
    find("warning").textContent = `Missing: rank ${summary.missing_ranks.join(", ")} wrote no trace.`;
  }
}
function theme(name) {
  document.documentElement.dataset.theme = name;
  draw();
}
const dark = window.matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
find("theme").onclick = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

cards(); table(); legend(); notes(); steps();
new ResizeObserver(() => { width = chart.clientWidth; draw(); }).observe(chart);
width = chart.clientWidth;
theme(dark.matches ? "dark" : "light");

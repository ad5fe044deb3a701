// The plan's candidates: a scatter of memory against time with the nearest point on hover, a filter, and what matches it.
// Data comes as columns from the page itself; text goes into the page as text alone, never as markup.
"use strict";
(() => {
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", () => {
      getSelection().selectAllChildren(button.nextElementSibling);  // stays, for who copies by hand
      button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";  // needs no permission
    });
  }
  const data = JSON.parse(document.getElementById("plan-data").textContent);
  const number = data.step_s.length;
  if (!number) return;
  const byId = (id) => document.getElementById(id);
  const canvas = byId("scatter"), tip = byId("tip"), ring = byId("ring"), filter = byId("filter"), ink = canvas.getContext("2d");
  const GIB = 2 ** 30, MARGIN = { left: 62, right: 14, top: 22, bottom: 40 }, REACH = 24, LISTED = 15;

  // Words and figures -------------------------------------------------------------------------------------------------
  const rounded = (value) => (Math.abs(value) >= 999.5 ? Math.round(value).toLocaleString("en") : `${+value.toPrecision(3)}`);
  const scaled = (value, units) => {
    const [suffix, size] = units.find((unit) => value >= 0.9995 * unit[1]) || units[units.length - 1];
    return rounded(value / size) + suffix;
  };
  const bytes = (value) => scaled(value, [[" GiB", GIB], [" MiB", 2 ** 20], [" KiB", 1024], [" B", 1]]);
  const seconds = (value) => scaled(value, [[" s", 1], [" ms", 1e-3], [" µs", 1e-6]]);
  const label = (i) => data.labels[i].map((part) => data.parts[part]).join(" + ") || "plain";
  const reason = (i) => said(data.reasons[data.why[i]]);
  const spent = (i) => Object.entries(data.shares).map(([name, column]) => [column[i], name]).filter((each) => each[0])
    .sort((a, b) => b[0] - a[0]).map(([share, name]) => `${name} ${share}%`).join(", ");
  const kindOf = data.reasons.map((text) => text.split(":")[0] || "fits");
  const said = (name) => name.replace(/^(host )?memory/, "out of $&");
  const place = (name) => ["memory", "fits"].indexOf(name);  // their colours stay, whatever else there is
  const kinds = [...new Set(data.why.map((why) => kindOf[why]))].sort((a, b) => place(b) - place(a) || (a < b ? -1 : 1));
  const kind = Int8Array.from(data.why, (why) => kinds.indexOf(kindOf[why]));
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colourOf = (k) => (kinds[k] === "fits" ? "--fits" : `--c${(kinds[0] === "fits" ? k : k + 1) % 10}`);

  // What is shown -----------------------------------------------------------------------------------------------------
  const shownKinds = new Set(kinds.keys());
  const visible = new Uint8Array(number).fill(1);
  const fits = (i) => kinds[kind[i]] === "fits";
  const order = Uint32Array.from({ length: number }, (_, i) => i)
    .sort((a, b) => fits(b) - fits(a) || data.step_s[a] - data.step_s[b]);  // what fits comes first
  let selected = -1;

  function select() {
    const terms = filter.value.toLowerCase().split("+").map((term) => term.trim()).filter(Boolean);
    const inParts = terms.map((term) => data.parts.map((part) => part.toLowerCase().includes(term)));
    const inReasons = terms.map((term) => data.reasons.map((text) => text.toLowerCase().includes(term)));
    let count = 0;
    for (let i = 0; i < number; i++) {
      const holds = (_, t) => data.labels[i].some((part) => inParts[t][part]) || inReasons[t][data.why[i]];
      visible[i] = shownKinds.has(kind[i]) && terms.every(holds);
      count += visible[i];
    }
    byId("count").textContent = `${count.toLocaleString("en")} of ${number.toLocaleString("en")}`;
    let reasons = 0;
    for (const row of document.querySelectorAll("#why-not tbody tr")) {
      const text = row.textContent.toLowerCase(), k = kinds.indexOf(row.dataset.kind);
      row.hidden = !(terms.every((term) => text.includes(term)) && (k < 0 || shownKinds.has(k)));
      reasons += !row.hidden;
    }
    for (const [table, words, found] of [["matches", "no-match", count], ["why-not", "no-reason", reasons]]) {
      byId(table).hidden = !found;
      byId(words).hidden = found > 0;
    }
    list();
    draw();
  }

  function list() {
    const body = byId("matches").tBodies[0];
    body.replaceChildren();
    for (let at = 0; at < number && body.childElementCount < LISTED; at++) {
      const i = order[at];
      if (!visible[i]) continue;
      const row = body.insertRow();
      for (const text of [label(i), seconds(data.step_s[i]), bytes(data.peak_bytes[i]), reason(i) || "fits"]) {
        row.insertCell().textContent = text;
      }
      row.className = label(i) === data.chosen.label ? "chosen" : "";
      row.cells[1].className = row.cells[2].className = "number";
      row.addEventListener("pointerenter", () => show(i));
    }
  }

  // The plot: both axes logarithmic -----------------------------------------------------------------------------------
  const across = new Float32Array(number), down = new Float32Array(number);
  const bounds = (values, also) => {
    let low = also, high = also;
    for (const value of values) if (value > 0) { low = Math.min(low, value); high = Math.max(high, value); }
    return [low / 1.15, high * 1.15];
  };
  const limits = { x: bounds(data.peak_bytes, data.limit_bytes), y: bounds(data.step_s, data.chosen.step_s) };

  function ticks([low, high], unit) {
    const found = [];
    for (let power = Math.floor(Math.log10(low / unit)); power <= Math.log10(high / unit); power++) {
      for (const step of [1, 2, 5]) found.push(step * 10 ** power * unit);
    }
    const inside = found.filter((value) => value >= low && value <= high);
    return inside.length > 9 ? inside.filter((value) => Math.abs(Math.log10(value / unit) % 1) < 1e-6) : inside;
  }

  function draw() {
    const width = canvas.clientWidth, height = canvas.clientHeight, sharp = window.devicePixelRatio || 1;
    canvas.width = width * sharp;
    canvas.height = height * sharp;
    ink.setTransform(sharp, 0, 0, sharp, 0, 0);
    ink.font = "12px system-ui, sans-serif";
    const scale = ([low, high], from, to) => (value) => from + (Math.log(value / low) / Math.log(high / low)) * (to - from);
    const x = scale(limits.x, MARGIN.left, width - MARGIN.right), y = scale(limits.y, height - MARGIN.bottom, MARGIN.top);
    axes(x, y, width, height);
    for (let i = 0; i < number; i++) {
      across[i] = x(data.peak_bytes[i]);
      down[i] = y(data.step_s[i]);
    }
    const size = number > 20000 ? 2 : number > 2000 ? 3 : 5;
    for (let k = kinds.length - 1; k >= 0; k--) {  // what fits comes last, on top
      ink.fillStyle = colour(colourOf(k));
      ink.globalAlpha = number > 20000 ? 0.6 : 0.8;
      for (let i = 0; i < number; i++) {
        if (visible[i] && kind[i] === k) ink.fillRect(across[i] - size / 2, down[i] - size / 2, size, size);
      }
    }
    ink.globalAlpha = 1;
    front(x, y);
    markChoice(x(data.chosen.peak_bytes), y(data.chosen.step_s));
    show(-1);
  }

  function axes(x, y, width, height) {
    const bottom = height - MARGIN.bottom, right = width - MARGIN.right;
    ink.strokeStyle = colour("--line");
    ink.fillStyle = colour("--soft");
    ink.lineWidth = 1;
    ink.textAlign = "center";
    for (const value of ticks(limits.x, GIB)) {
      line([[x(value), MARGIN.top], [x(value), bottom]]);
      ink.fillText(bytes(value), x(value), bottom + 16);
    }
    ink.textAlign = "right";
    for (const value of ticks(limits.y, 1)) {
      line([[MARGIN.left, y(value)], [right, y(value)]]);
      ink.fillText(seconds(value), MARGIN.left - 6, y(value) + 4);
    }
    ink.fillText("peak memory of a device →", right, bottom + 34);
    ink.textAlign = "left";
    ink.fillText("↑ step", 4, 12);
    ink.strokeStyle = ink.fillStyle = colour("--mark");
    ink.setLineDash([4, 4]);
    line([[x(data.limit_bytes), MARGIN.top], [x(data.limit_bytes), bottom]]);
    ink.setLineDash([]);
    ink.textAlign = "center";
    ink.fillText(`usable ${bytes(data.limit_bytes)}`, Math.min(x(data.limit_bytes), right - 60), 14);
  }

  function line(points) {
    ink.beginPath();
    points.forEach(([px, py], at) => (at ? ink.lineTo(px, py) : ink.moveTo(px, py)));
    ink.stroke();
  }

  function front(x, y) {
    const points = data.pareto.map((each) => [x(each.peak_bytes), y(each.step_s)]);
    if (points.length < 2) return;
    ink.strokeStyle = colour("--ink");
    ink.lineWidth = 1.5;
    line(points);
  }

  function markChoice(px, py) {
    ink.strokeStyle = ink.fillStyle = colour("--choice");
    ink.lineWidth = 2;
    ink.beginPath();
    ink.arc(px, py, 7, 0, 2 * Math.PI);
    ink.stroke();
    ink.textAlign = px > canvas.clientWidth - 80 ? "right" : "left";
    ink.fillText("chosen", px + (ink.textAlign === "left" ? 11 : -11), py - 6);
  }

  // Pointing ----------------------------------------------------------------------------------------------------------
  function nearest(px, py) {
    let found = -1, best = REACH * REACH;
    for (let i = 0; i < number; i++) {
      if (!visible[i]) continue;
      const dx = across[i] - px, dy = down[i] - py, distance = dx * dx + dy * dy;
      if (distance < best) { best = distance; found = i; }
    }
    return found;
  }

  function show(i) {
    selected = i;
    tip.hidden = ring.hidden = i < 0;
    if (i < 0) return;
    tip.replaceChildren();
    for (const text of [label(i), `${seconds(data.step_s[i])}, ${bytes(data.peak_bytes[i])}`, spent(i), reason(i) || "fits"]) {
      tip.appendChild(document.createElement("div")).textContent = text;
    }
    for (const each of [ring, tip]) {
      each.style.left = `${across[i]}px`;
      each.style.top = `${down[i]}px`;
    }
    const aside = Math.max(-across[i], Math.min(14, canvas.clientWidth - tip.offsetWidth - across[i]));
    const isLow = down[i] + 14 + tip.offsetHeight > canvas.clientHeight;
    tip.style.transform = `translate(${aside}px, ${isLow ? -14 - tip.offsetHeight : 14}px)`;
  }

  canvas.addEventListener("pointermove", (event) => {
    const i = nearest(event.offsetX, event.offsetY);
    if (i !== selected) show(i);
  });
  canvas.addEventListener("pointerleave", () => show(-1));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    for (let at = selected < 0 ? (step > 0 ? 0 : -1) : order.indexOf(selected) + step; at >= 0 && at < number; at += step) {
      if (visible[order[at]]) return show(order[at]);
    }
  });

  // The boxes, one for each kind --------------------------------------------------------------------------------------
  kinds.forEach((name, k) => {
    const box = document.createElement("input"), dot = document.createElement("span"), text = document.createElement("label");
    box.type = "checkbox";
    box.checked = true;
    dot.className = "dot";
    dot.style.background = `var(${colourOf(k)})`;
    text.append(box, dot, said(name));
    byId("kinds").append(text);
    box.addEventListener("change", () => (box.checked ? shownKinds.add(k) : shownKinds.delete(k), select()));
  });
  filter.addEventListener("input", select);
  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  window.addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; draw(); });
  window.addEventListener("afterprint", () => { delete document.documentElement.dataset.theme; draw(); });
  select();
})();

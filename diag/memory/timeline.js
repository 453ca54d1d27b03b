// The timeline of diag.memory.page: stacked owners over events or time. Drag to zoom, double click to go back,
// arrow keys to move. All texts are set as textContent; the data is a JSON block of the same page.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("memory-data").textContent);
  const hues = [210, 28, 140, 350, 265, 175, 50, 310, 95, 235, 10, 190, 75, 0];
  const dark = matchMedia("(prefers-color-scheme:dark)").matches;
  const colour = (i, name) => name.startsWith("allocated before") ? (dark ? "#4a525c" : "#b8c0c8")
    : name === "all others" ? (dark ? "#6b747e" : "#d5dae0") : `hsl(${hues[i % hues.length]} 55% ${dark ? 52 : 60}%)`;
  const size = (v) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let u = 0;
    while (Math.abs(v) >= 1024 && u < 4) { v /= 1024; u += 1; }
    return `${v.toFixed(u && Math.abs(v) < 100 ? 1 : 0)} ${units[u]}`;
  };
  for (const box of document.querySelectorAll("figure.memory")) {
    const item = data[Number(box.dataset.place)];
    const canvas = box.querySelector("canvas"), tip = box.querySelector(".tip"), legend = box.querySelector(".legend");
    const toggle = box.querySelector("button.time"), back = box.querySelector("button.back");
    const n = item.index.length, layers = item.layers.length;
    const hidden = new Set();
    let byTime = false, from = 0, to = 1, dragged = null, hover = null;
    const xs = () => byTime ? item.time_us : item.index;
    const range = () => {
      const x = xs(), low = x[0], high = Math.max(x[n - 1], low + 1);
      return [low + from * (high - low), low + to * (high - low)];
    };
    const place = (value) => { // the last point at or before `value`
      const x = xs();
      let a = 0, b = n - 1;
      while (a < b) { const m = (a + b + 1) >> 1; if (x[m] <= value) a = m; else b = m - 1; }
      return a;
    };
    const left = 64, right = 10, top = 12, bottom = 26;
    const draw = () => {
      const scale = devicePixelRatio || 1, wide = canvas.clientWidth, high = canvas.clientHeight;
      canvas.width = wide * scale; canvas.height = high * scale;
      const g = canvas.getContext("2d");
      g.scale(scale, scale);
      const style = getComputedStyle(document.body), ink = style.color;
      const [low, up] = range(), x = xs();
      const first = Math.max(place(low) - 1, 0), last = Math.min(place(up) + 1, n - 1);
      let most = 1;
      for (let i = first; i <= last; i += 1) most = Math.max(most, item.reserved[i], item.allocated[i]);
      const px = (v) => left + (v - low) / (up - low) * (wide - left - right);
      const py = (v) => high - bottom - v / most * (high - top - bottom);
      g.clearRect(0, 0, wide, high);
      g.save();
      g.beginPath(); g.rect(left, 0, wide - left - right, high - bottom); g.clip();
      const base = new Float64Array(n);
      for (let k = 0; k < layers; k += 1) {
        if (hidden.has(k)) continue;
        g.beginPath();
        g.moveTo(px(x[first]), py(base[first]));
        for (let i = first; i <= last; i += 1) g.lineTo(px(x[i]), py(base[i] + item.values[k][i]));
        for (let i = last; i >= first; i -= 1) g.lineTo(px(x[i]), py(base[i]));
        g.closePath();
        g.fillStyle = colour(k, item.layers[k]);
        g.fill();
        for (let i = first; i <= last; i += 1) base[i] += item.values[k][i];
      }
      g.beginPath();
      for (let i = first; i <= last; i += 1) g.lineTo(px(x[i]), py(item.reserved[i]));
      g.strokeStyle = ink; g.lineWidth = 1; g.stroke();
      for (const [event, what] of item.marks) {
        const at = px(byTime ? item.time_us[Math.min(placeOfEvent(event), n - 1)] : event);
        const bad = what === "out of memory", peak = what === "peak";
        g.strokeStyle = bad ? "#c4232b" : peak ? ink : "#88888866";
        g.setLineDash(peak ? [4, 3] : []);
        g.beginPath(); g.moveTo(at, top); g.lineTo(at, high - bottom); g.stroke();
        g.setLineDash([]);
        if (bad || peak) { g.fillStyle = bad ? "#c4232b" : ink; g.font = "11px sans-serif"; g.fillText(what, at + 3, top + 8); }
      }
      if (dragged) {
        g.fillStyle = "#3388ff33";
        g.fillRect(Math.min(dragged[0], dragged[1]), top, Math.abs(dragged[1] - dragged[0]), high - top - bottom);
      } else if (hover !== null) {
        g.strokeStyle = ink; g.beginPath(); g.moveTo(px(x[hover]), top); g.lineTo(px(x[hover]), high - bottom); g.stroke();
      }
      g.restore();
      g.fillStyle = ink; g.font = "11px sans-serif"; g.textAlign = "right";
      for (let k = 0; k <= 4; k += 1) g.fillText(size(most * k / 4), left - 5, py(most * k / 4) + 4);
      g.textAlign = "center";
      for (let k = 0; k <= 4; k += 1) {
        const v = low + (up - low) * k / 4;
        const words = byTime ? `${((v - x[0]) / 1e6).toFixed(3)} s` : Math.round(v).toLocaleString("en");
        g.fillText(words, Math.min(Math.max(px(v), left + 20), wide - 34), high - 9);
      }
      back.disabled = from === 0 && to === 1;
    };
    const placeOfEvent = (event) => {
      let a = 0, b = n - 1;
      while (a < b) { const m = (a + b) >> 1; if (item.index[m] < event) a = m + 1; else b = m; }
      return a;
    };
    const show = (i) => {
      tip.textContent = "";
      const rows = [[`event ${item.index[i].toLocaleString("en")}`, ""], ["reserved", size(item.reserved[i])],
                    ["requested", size(item.allocated[i])]];
      for (let k = layers - 1; k >= 0; k -= 1) if (item.values[k][i]) rows.push([item.layers[k], size(item.values[k][i])]);
      for (const [a, b] of rows) {
        const row = document.createElement("div"), name = document.createElement("span"), value = document.createElement("b");
        name.textContent = a; value.textContent = b;
        row.append(name, value); tip.append(row);
      }
    };
    const x01 = (event) => {
      const r = canvas.getBoundingClientRect();
      return Math.min(Math.max((event.clientX - r.left - left) / (r.width - left - right), 0), 1);
    };
    canvas.addEventListener("pointerdown", (e) => { dragged = [e.offsetX, e.offsetX, x01(e)]; canvas.setPointerCapture(e.pointerId); });
    canvas.addEventListener("pointermove", (e) => {
      if (dragged) dragged[1] = e.offsetX;
      const [low, up] = range();
      hover = place(low + x01(e) * (up - low));
      show(hover);
      requestAnimationFrame(draw);
    });
    canvas.addEventListener("pointerup", (e) => {
      if (dragged && Math.abs(dragged[1] - dragged[0]) > 4) {
        const a = Math.min(dragged[2], x01(e)), b = Math.max(dragged[2], x01(e)), span = to - from;
        [from, to] = [from + a * span, from + b * span];
      }
      dragged = null; draw();
    });
    const reset = () => { from = 0; to = 1; draw(); };
    canvas.addEventListener("dblclick", reset);
    canvas.addEventListener("keydown", (e) => {
      const span = to - from, step = e.key === "ArrowLeft" ? -span / 4 : e.key === "ArrowRight" ? span / 4 : 0;
      if (step) { const d = Math.min(Math.max(step, -from), 1 - to); from += d; to += d; draw(); e.preventDefault(); }
      if (e.key === "Escape") reset();
    });
    back.addEventListener("click", reset);
    toggle.hidden = !item.time_us.length;
    toggle.addEventListener("click", () => { byTime = !byTime; toggle.textContent = byTime ? "by event" : "by time"; from = 0; to = 1; draw(); });
    item.layers.forEach((name, k) => {
      const entry = document.createElement("button"), chip = document.createElement("i");
      chip.style.background = colour(k, name);
      entry.append(chip, name);
      entry.addEventListener("click", () => { hidden.has(k) ? hidden.delete(k) : hidden.add(k); entry.classList.toggle("off"); draw(); });
      legend.append(entry);
    });
    addEventListener("resize", draw);
    const peak = item.allocated.reduce((best, v, i) => v > item.allocated[best] ? i : best, 0);
    show(peak);
    draw();
  }
})();

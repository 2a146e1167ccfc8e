// The one script of all pages. Without it they say the same: nothing but comfort depends on it.
"use strict";
(() => {
  const $ = (q, root = document) => root.querySelector(q);
  const all = (q, root = document) => [...root.querySelectorAll(q)];
  const make = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [k, v] of Object.entries(attributes)) made.setAttribute(k, v);
    return made;
  };

  // ---- tips: what a <title> inside a drawing says, shown at once
  const tip = $("#tip");
  const hide = () => { tip.hidden = true; };
  const show = (event, ...inside) => {
    event.told = true;
    tip.replaceChildren(...inside);
    tip.hidden = false;
    const w = tip.offsetWidth, h = tip.offsetHeight;
    const x = event.clientX + 14 + w > innerWidth - 8 ? event.clientX - w - 14 : event.clientX + 14;
    const y = event.clientY + 14 + h > innerHeight - 8 ? event.clientY - h - 14 : event.clientY + 14;
    tip.style.left = Math.max(4, x) + "px";
    tip.style.top = Math.max(4, y) + "px";
  };
  const bold = (text) => { const b = document.createElement("b"); b.textContent = text; return b; };
  const lines = (text) => {
    const [first, ...rest] = text.split("\n");
    return rest.length ? [bold(first), "\n" + rest.join("\n")] : [text];
  };
  for (const title of all("svg title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.parentNode.classList.add("tipped");
    title.remove();
  }
  addEventListener("mousemove", (event) => {
    const over = event.target.closest?.("[data-tip]");
    if (over) show(event, ...lines(over.dataset.tip));
    else if (!event.told) hide();
  });

  // ---- words
  const num = (v) => {
    const a = Math.abs(v);
    if (a >= 1e4) return Math.round(v).toLocaleString("en");
    return a >= 100 ? v.toFixed(0) : a >= 1 ? v.toFixed(1) : v === 0 ? "0" : v.toPrecision(2);
  };
  const span = (s) => s < 60 ? num(s) + " s" : s < 5400 ? num(s / 60) + " min" : s < 172800 ? num(s / 3600) + " h" : num(s / 86400) + " d";
  const when = (t) => new Date(t * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC";
  const word = (kind, v) => kind === "seconds" ? span(v) : kind === "time" ? when(v) : num(v);
  const nearest = (list, value) => {  // of a rising list
    let low = 0, high = list.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; if (list[mid] < value) low = mid; else high = mid; }
    return Math.abs(list[low] - value) <= Math.abs(list[high] - value) ? low : high;
  };
  const point = (svg, event) => {
    const box = svg.getBoundingClientRect(), k = svg.viewBox.baseVal.width / box.width;
    return [(event.clientX - box.left) * k, (event.clientY - box.top) * k];
  };

  // ---- drawings: what a line is at the pointer, series off and on, saved as a file
  const hairline = (svg, top, bottom) => {
    const hair = svg.appendChild(make("line", { class: "hair", y1: top, y2: bottom }));
    hair.style.display = "none";
    const at = (x) => { hair.style.display = x === null ? "none" : ""; if (x !== null) { hair.setAttribute("x1", x); hair.setAttribute("x2", x); } };
    svg.addEventListener("mouseleave", () => { at(null); hide(); });
    return at;
  };
  for (const svg of all("svg[data-chart]")) {
    const c = JSON.parse(svg.dataset.chart), [scale, lo, hi, a, b, kind] = c.x, [, , bottom, top] = c.y;
    const f = scale === "log" ? Math.log : (v) => v, g = scale === "log" ? Math.exp : (v) => v;
    const hair = hairline(svg, top, bottom);
    svg.addEventListener("mousemove", (event) => {
      const [x, y] = point(svg, event);
      if (x < a || x > b || y < top - 6 || y > bottom + 6) { hair(null); return; }
      const v = g(f(lo) + (x - a) / (b - a) * (f(hi) - f(lo)));
      const rows = [];
      c.s.forEach((s, i) => {
        if ($('.key[data-series="' + i + '"]', svg)?.classList.contains("off") || !s.p.length) return;
        let l = 0, r = s.p.length - 1;
        while (l < r) { const m = (l + r + 1) >> 1; if (s.p[m][0] <= v) l = m; else r = m - 1; }
        let value = s.p[l][1];
        if (v < s.p[0][0]) { if (kind === "time" || !/share/.test(c.yl)) return; value = 0; }
        else if (!s.st && l < s.p.length - 1) {
          const [x0, y0] = s.p[l], [x1, y1] = s.p[l + 1], u = (w) => f(Math.max(w, 1e-9)), t = (u(v) - u(x0)) / (u(x1) - u(x0) || 1);
          if (scale !== "log" || x0 > 0) value = y0 + Math.min(Math.max(t, 0), 1) * (y1 - y0);
        }
        const swatch = document.createElement("i");
        swatch.style.background = s.n ? `var(--${s.n})` : s.c;
        rows.push("\n", swatch, `${s.l}: ${num(value)}${/%/.test(c.yl) ? " %" : ""}`);
      });
      hair(x);
      if (rows.length) show(event, bold(word(kind, v)), ...rows);
    });
  }
  for (const key of all("svg .key")) {
    key.setAttribute("tabindex", "0");
    key.setAttribute("role", "button");
    const flip = () => {
      const off = key.classList.toggle("off");
      for (const s of all('.s[data-series="' + key.dataset.series + '"]', key.closest("svg"))) s.classList.toggle("off", off);
    };
    key.addEventListener("click", flip);
    key.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); flip(); } });
  }
  const save = (name, type, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  for (const button of all(".panel > button")) {
    button.addEventListener("click", () => {
      const svg = $("svg", button.parentElement).cloneNode(true);
      for (const h of all(".hair", svg)) h.remove();
      svg.removeAttribute("data-chart");
      save(button.dataset.name + ".svg", "image/svg+xml", new XMLSerializer().serializeToString(svg));
    });
  }
  // What hovers over a drawing as a whole: the nearest of its points [x, y, text], or the span [from, to, text] at the pointer.
  const held = $("script#data"), data = held ? JSON.parse(held.textContent) : {};
  for (const [id, hover] of Object.entries(data)) {
    const svg = $(`figure#${CSS.escape(id)} svg`);
    if (!svg || !(hover.points ?? hover.spans)?.length) continue;
    const hair = hover.points && hairline(svg, hover.top, hover.bottom), places = hover.points?.map((p) => p[0]);
    const dot = hover.points && svg.appendChild(make("circle", { class: "dot", r: 4 }));
    if (dot) dot.style.display = "none";
    svg.addEventListener("mousemove", (event) => {
      const [x] = point(svg, event);
      let found = hover.spans?.find((s) => x >= s[0] && x <= Math.max(s[1], s[0] + 0.6));
      if (places && x >= places[0] - 6 && x <= places[places.length - 1] + 6) found = hover.points[nearest(places, x)];
      if (dot) { hair(found ? found[0] : null); dot.style.display = found ? "" : "none"; }
      if (dot && found) { dot.setAttribute("cx", found[0]); dot.setAttribute("cy", found[1]); }
      if (found) show(event, ...lines(found[2]));
    });
    svg.addEventListener("mouseleave", () => { hide(); if (dot) dot.style.display = "none"; });
  }

  // ---- tables: unfold, sort, filter, copy
  const details = (row) => row.nextElementSibling?.classList.contains("more") ? row.nextElementSibling : null;
  for (const button of all(".unfold")) {
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") !== "true";
      button.setAttribute("aria-expanded", open);
      details(button.closest("tr")).hidden = !open;
    });
  }
  for (const head of all("th[data-sort]")) {
    head.tabIndex = 0;
    const sort = () => {
      const table = head.closest("table"), column = [...head.parentNode.children].indexOf(head), numeric = head.dataset.sort === "num";
      const down = numeric ? head.getAttribute("aria-sort") !== "descending" : head.getAttribute("aria-sort") === "ascending";
      for (const other of all("th", table)) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => {
        const cell = row.children[column], said = cell.dataset.v ?? cell.textContent.trim();
        return !numeric ? said : said === "" || said === "–" ? -Infinity : Number(said.replaceAll(",", "").match(/^-?[\d.]+(?:e[-+]?\d+)?/)?.[0] ?? -Infinity);
      };
      for (const body of table.tBodies) {
        const rows = [...body.children].filter((row) => !row.classList.contains("more")).map((row) => [key(row), row, details(row)]);
        rows.sort(([x], [y]) => (down ? -1 : 1) * (numeric ? (x === y ? 0 : x - y) : x.localeCompare(y, undefined, { numeric: true })));
        body.append(...rows.flatMap(([, row, more]) => more ? [row, more] : [row]));
      }
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (e) => { if (e.key === "Enter") sort(); });
  }
  for (const input of all("input[data-filters]")) {
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of all(input.dataset.filters + " > tr:not(.more)")) {
        const text = (row.dataset.task ?? row.textContent).toLowerCase(), more = details(row);
        row.hidden = !words.every((w) => text.includes(w));
        if (more && row.hidden && $(".unfold", row)) { more.hidden = true; $(".unfold", row).setAttribute("aria-expanded", false); }
      }
    });
  }
  for (const button of all("button[data-copy]")) {
    button.addEventListener("click", async () => {
      const before = button.textContent;
      try { await navigator.clipboard.writeText(button.dataset.copy); button.textContent = "Copied"; }
      catch { save(button.dataset.name, "text/plain", button.dataset.copy); button.textContent = "Saved"; }
      setTimeout(() => { button.textContent = before; }, 1500);
    });
  }
  addEventListener("beforeprint", () => all("details").forEach((d) => { d.dataset.was = d.open ? "1" : ""; d.open = true; }));
  addEventListener("afterprint", () => all("details").forEach((d) => { d.open = d.dataset.was === "1"; }));

  // ---- what everybody did when: zoom, and the bars of one task
  for (const gantt of all("svg.zooms")) {
    const left = Number(gantt.dataset.left), plot = Number(gantt.dataset.plot), whole = Number(gantt.dataset.span);
    const bars = all(".b, .lane", gantt), labels = all(".t", gantt), axis = $(".ticks", gantt), y1 = axis.dataset.top, y2 = axis.dataset.bottom;
    const busy = $("svg.follows"), back = $("#zoom-out"), brush = gantt.appendChild(make("rect", { class: "brush", y: 0, height: y2, width: 0 }));
    let from = 0, to = whole, start = null;
    const x = (t) => left + plot * (t - from) / (to - from), clip = (v) => Math.min(left + plot, Math.max(left, v));
    const steps = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800];
    const clock = (t, step) => {
      const pad = (v) => String(Math.floor(v)).padStart(2, "0");
      if (t === 0) return "0";
      if (step >= 3600) return `${+(t / 3600).toFixed(2)} h`;
      if (step >= 60) return t < 3600 ? `${+(t / 60).toFixed(2)} min` : `${Math.floor(t / 3600)}:${pad(t % 3600 / 60)} h`;
      if (t < 60) return `${+t.toFixed(3)} s`;
      if (step < 1) return `${Math.floor(t / 60)}:${(t % 60).toFixed(2).padStart(5, "0")} min`;
      return t < 3600 ? `${Math.floor(t / 60)}:${pad(t % 60)} min` : `${Math.floor(t / 3600)}:${pad(t % 3600 / 60)}:${pad(t % 60)}`;
    };
    const zoom = (a, b) => {
      from = Math.max(0, a); to = Math.min(whole, b);
      for (const bar of bars) {
        const a = x(Number(bar.dataset.a)), b = x(Number(bar.dataset.b)), there = b >= left && a <= left + plot;
        bar.setAttribute("x", clip(a).toFixed(2));
        bar.setAttribute("width", (there ? Math.max(bar.classList.contains("b") ? 0.7 : 0, clip(b) - clip(a)) : 0).toFixed(2));
      }
      for (const t of labels) {
        const lo = clip(x(Number(t.dataset.a))), hi = clip(x(Number(t.dataset.b))), full = t.dataset.full, room = Math.floor((hi - lo - 8) / 6.4);
        t.textContent = full.length <= room ? full : room >= 4 ? full.slice(0, room - 1) + "…" : "";
        t.setAttribute("x", (lo + 4).toFixed(1));
      }
      const step = steps.find((s) => (to - from) / s <= 10) ?? (to - from) / 10;
      axis.replaceChildren();
      for (let i = Math.ceil(from / step - 1e-9); i * step <= to * 1.000001; i++) {
        const at = x(i * step).toFixed(1), tick = axis.appendChild(make("g", { class: "tick" }));
        tick.append(make("line", { x1: at, x2: at, y1, y2, class: "s-rule" }), make("text", { x: at, y: Number(y2) + 15, class: "f-soft", "text-anchor": "middle" }));
        tick.lastChild.textContent = clock(i * step, step);
      }
      if (busy) {
        const values = busy.dataset.values.split(" ").map(Number), made = Number(busy.dataset.made), base = busy.dataset.base, high = busy.dataset.high;
        const at = (i) => clip(x(made * i / values.length)).toFixed(1);
        $("polygon", busy).setAttribute("points", [`${at(0)},${base}`, ...values.map((v, i) => `${at(i)},${base - high * v} ${at(i + 1)},${base - high * v}`), `${at(values.length)},${base}`].join(" "));
      }
      back.hidden = from === 0 && to === whole;
    };
    const time = (event) => from + (clip(point(gantt, event)[0]) - left) / plot * (to - from);
    back.addEventListener("click", () => zoom(0, whole));
    gantt.addEventListener("dblclick", () => zoom(0, whole));
    gantt.addEventListener("pointerdown", (e) => { if (e.button === 0) { start = time(e); gantt.setPointerCapture(e.pointerId); } });
    gantt.addEventListener("pointermove", (e) => {
      if (start === null) return;
      const a = x(Math.min(start, time(e))), b = x(Math.max(start, time(e)));
      brush.setAttribute("x", a);
      brush.setAttribute("width", b - a);
    });
    gantt.addEventListener("pointerup", (e) => {
      if (start === null) return;
      const end = time(e), a = Math.min(start, end), b = Math.max(start, end);
      start = null;
      brush.setAttribute("width", 0);
      if (b - a > (to - from) * 0.01) zoom(a, b);
    });
    const pick = (task) => {
      gantt.classList.toggle("picked", Boolean(task));
      for (const b of [...bars, ...labels]) b.classList.toggle("hit", Boolean(task) && (b.dataset.task ?? b.dataset.full) === task);
    };
    gantt.addEventListener("pointerover", (e) => { if (start === null) pick(e.target.dataset?.task); });
    gantt.addEventListener("pointerleave", () => { pick(null); hide(); });
    for (const row of all("tr[data-task]")) {
      row.addEventListener("mouseenter", () => pick(row.dataset.task));
      row.addEventListener("mouseleave", () => pick(null));
    }
    if (location.hash.startsWith("#zoom=")) {
      const [a, b] = location.hash.slice(6).split(",").map(Number);
      if (b > a) zoom(a, b);
    }
  }
})();

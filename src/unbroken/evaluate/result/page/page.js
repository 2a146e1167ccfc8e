"use strict";
(() => {
  const $ = (q, root = document) => root.querySelector(q);
  const all = (q, root = document) => [...root.querySelectorAll(q)];

  // ---- tables: unfold, sort, filter, copy
  for (const button of all(".unfold")) {
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") !== "true";
      button.setAttribute("aria-expanded", open);
      button.closest("tr").nextElementSibling.hidden = !open;
    });
  }
  for (const head of all("table.sortable th[data-sort]")) {
    head.tabIndex = 0;
    const sort = () => {
      const table = head.closest("table"), column = [...head.parentNode.children].indexOf(head);
      const numeric = head.dataset.sort === "num";
      const up = head.getAttribute("aria-sort") === (numeric ? "descending" : "ascending");
      const way = numeric ? (up ? 1 : -1) : (up ? -1 : 1);
      all("th", table).forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      for (const body of table.tBodies) {
        const pairs = [];
        for (const row of [...body.children]) {
          if (row.classList.contains("detail")) pairs[pairs.length - 1].push(row);
          else pairs.push([row]);
        }
        const key = ([row]) => {
          const cell = row.children[column];
          if (!numeric) return cell.textContent.trim();
          return cell.dataset.v === "" ? -Infinity : Number(cell.dataset.v);
        };
        pairs.sort((a, b) => {
          const x = key(a), y = key(b);
          return way * (numeric ? x - y || 0 : x.localeCompare(y, undefined, { numeric: true }));
        });
        body.append(...pairs.flat());
      }
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (e) => { if (e.key === "Enter") sort(); });
  }
  $("#find")?.addEventListener("input", (e) => {
    const words = e.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of all("#tasks .taskrow")) {
      const shown = words.every((w) => row.dataset.task.toLowerCase().includes(w));
      row.hidden = !shown;
      if (!shown) {
        row.nextElementSibling.hidden = true;
        $(".unfold", row).setAttribute("aria-expanded", false);
      }
    }
  });
  $("#csv")?.addEventListener("click", async (e) => {
    const report = JSON.parse($("#report").textContent);
    const quote = (v) => /[",\n]/.test(String(v)) ? `"${String(v).replaceAll('"', '""')}"` : String(v);
    const lines = ["task,metric,value,stderr,scored,samples"];
    for (const s of [...report.groups, ...report.scores]) {
      for (const m of s.metrics) {
        lines.push([s.task, m.name, m.value ?? "", m.stderr ?? "", s.scored, s.samples].map(quote).join(","));
      }
    }
    const text = lines.join("\n") + "\n";
    let said = "Copied";
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
      link.download = "scores.csv";
      link.click();
      said = "Saved";
    }
    const button = e.target, before = button.textContent;
    button.textContent = said;
    setTimeout(() => { button.textContent = before; }, 1500);
  });

  // ---- the chart: zoom, highlight, tips
  const gantt = $("#gantt");
  if (!gantt) return;
  const left = Number(gantt.dataset.left), plot = Number(gantt.dataset.plot), span = Number(gantt.dataset.span);
  const bars = all(".b, .lane", gantt), labels = all("text.t", gantt);
  const axis = $(".axis", gantt), busy = $("#busy"), back = $("#zoom-out"), brush = $("#brush");
  const line = $(".tick line", axis), y1 = line.getAttribute("y1"), y2 = line.getAttribute("y2");
  const ty = $(".tick text", axis).getAttribute("y");
  let from = 0, to = span;
  const x = (t) => left + plot * (t - from) / (to - from);

  const clock = (t, step) => {
    const pad = (v) => String(Math.floor(v)).padStart(2, "0");
    if (t === 0) return "0";
    if (step >= 3600) return `${+(t / 3600).toFixed(2)} h`;
    if (step >= 60) return t < 3600 ? `${+(t / 60).toFixed(2)} min` : `${Math.floor(t / 3600)}:${pad(t % 3600 / 60)} h`;
    if (t < 60) return `${+t.toFixed(3)} s`;
    if (step < 1) return `${Math.floor(t / 60)}:${(t % 60).toFixed(2).padStart(5, "0")} min`;
    return t < 3600 ? `${Math.floor(t / 60)}:${pad(t % 60)} min` : `${Math.floor(t / 3600)}:${pad(t % 3600 / 60)}:${pad(t % 60)}`;
  };
  const steps = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800,
    3600, 7200, 10800, 21600, 43200, 86400, 172800];

  const draw = () => {
    for (const b of bars) {
      const a = x(Number(b.dataset.a)), e = x(Number(b.dataset.b));
      const lo = Math.max(left - 2, a), hi = Math.min(left + plot + 2, e);
      b.setAttribute("x", lo.toFixed(2));
      b.setAttribute("width", Math.max(hi < lo ? 0 : b.classList.contains("b") ? 0.7 : 0, hi - lo).toFixed(2));
    }
    for (const t of labels) {
      const a = Math.max(left, x(Number(t.dataset.a))), e = Math.min(left + plot, x(Number(t.dataset.b)));
      const full = t.dataset.full, room = Math.floor((e - a - 8) / 6.4);
      t.textContent = full.length <= room ? full : room >= 4 ? full.slice(0, room - 1) + "…" : "";
      t.setAttribute("x", (a + 4).toFixed(1));
    }
    const step = steps.find((s) => (to - from) / s <= 10) ?? (to - from) / 10;
    let ticks = "";
    for (let i = Math.ceil(from / step - 1e-9); i * step <= to * 1.000001; i++) {
      const at = x(i * step).toFixed(1);
      ticks += `<g class="tick"><line x1="${at}" x2="${at}" y1="${y1}" y2="${y2}"/>` +
        `<text x="${at}" y="${ty}">${clock(i * step, step)}</text></g>`;
    }
    axis.innerHTML = ticks;
    if (busy) {
      const values = busy.dataset.values.split(" ").map(Number), made = Number(busy.dataset.made);
      const clip = (v) => Math.min(left + plot, Math.max(left, v)).toFixed(1);
      const at = (i) => clip(x(made * i / values.length));
      const points = values.map((v, i) => `${at(i)},${54 - 46 * v} ${at(i + 1)},${54 - 46 * v}`);
      $(".area", busy).setAttribute("points", `${clip(x(0))},54 ${points.join(" ")} ${clip(x(made))},54`);
    }
    back.hidden = from === 0 && to === span;
  };
  const zoom = (a, b) => { from = Math.max(0, a); to = Math.min(span, b); draw(); };
  back.addEventListener("click", () => zoom(0, span));
  gantt.addEventListener("dblclick", () => zoom(0, span));

  const time = (e) => {
    const box = gantt.getBoundingClientRect();
    const at = (e.clientX - box.left) * gantt.viewBox.baseVal.width / box.width;
    return from + (Math.min(left + plot, Math.max(left, at)) - left) / plot * (to - from);
  };
  let start = null;
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
    for (const b of all(".b", gantt)) b.classList.toggle("hit", b.dataset.task === task);
    for (const t of labels) t.classList.toggle("hit", t.dataset.full === task);
  };
  for (const row of all(".taskrow")) {
    row.addEventListener("mouseenter", () => pick(row.dataset.task));
    row.addEventListener("mouseleave", () => pick(null));
  }
  const tip = $("#tip");
  all("#gantt title").forEach((t) => { if (t.parentNode.classList.contains("b")) t.remove(); });
  gantt.addEventListener("pointerover", (e) => {
    const b = e.target.closest?.(".b");
    if (!b || start !== null) return;
    pick(b.dataset.task || null);
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = b.dataset.task || b.dataset.worker;
    tip.append(head, (b.dataset.task ? `${b.dataset.worker}: ` : "") + b.dataset.says);
    tip.hidden = false;
  });
  gantt.addEventListener("pointermove", (e) => {
    tip.style.left = `${Math.min(innerWidth - tip.offsetWidth - 12, e.clientX + 14)}px`;
    tip.style.top = `${Math.min(innerHeight - tip.offsetHeight - 12, e.clientY + 16)}px`;
  });
  gantt.addEventListener("pointerout", () => { tip.hidden = true; pick(null); });
  if (location.hash.startsWith("#zoom=")) {
    const [a, b] = location.hash.slice(6).split(",").map(Number);
    if (b > a) zoom(a, b);
  }
})();

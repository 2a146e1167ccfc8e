"use strict";
(() => {
  const tip = document.getElementById("tip");
  const show = (html, e) => {
    tip.innerHTML = html;
    tip.style.opacity = 1;
    const w = tip.offsetWidth, h = tip.offsetHeight;
    let x = e.clientX + 14, y = e.clientY + 14;
    if (x + w > innerWidth - 8) x = e.clientX - w - 14;
    if (y + h > innerHeight - 8) y = e.clientY - h - 14;
    tip.style.left = Math.max(4, x) + "px";
    tip.style.top = Math.max(4, y) + "px";
  };
  const hide = () => { tip.style.opacity = 0; };
  const safe = (s) => String(s).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c]));
  const num = (v) => {
    const a = Math.abs(v);
    if (a >= 1e4) return Math.round(v).toLocaleString("en");
    return a >= 100 ? v.toFixed(0) : a >= 1 ? v.toFixed(1) : v.toPrecision(2);
  };
  const span = (s) => {
    if (s < 60) return num(s) + " s";
    if (s < 5400) return num(s / 60) + " min";
    if (s < 172800) return num(s / 3600) + " h";
    return num(s / 86400) + " d";
  };
  const when = (t) => new Date(t * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC";
  const word = (kind, v) => (kind === "seconds" ? span(v) : kind === "time" ? when(v) : num(v));

  for (const svg of document.querySelectorAll("svg")) {
    for (const key of svg.querySelectorAll(".key")) {
      key.setAttribute("tabindex", "0");
      key.setAttribute("role", "button");
      const flip = () => {
        const off = key.classList.toggle("off");
        for (const s of svg.querySelectorAll('.s[data-series="' + key.dataset.series + '"]')) s.classList.toggle("off", off);
      };
      key.addEventListener("click", flip);
      key.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); flip(); } });
    }
    for (const m of svg.querySelectorAll("[data-tip]")) {
      m.addEventListener("mousemove", (e) => show(safe(m.dataset.tip), e));
      m.addEventListener("mouseleave", hide);
    }
    if (!svg.dataset.chart) continue;
    const c = JSON.parse(svg.dataset.chart);
    const [scale, lo, hi, a, b, kind] = c.x;
    const [yl, yh, bottom, top] = c.y;
    const f = scale === "log" ? Math.log : (v) => v, g = scale === "log" ? Math.exp : (v) => v;
    const px = (v) => a + ((f(Math.max(v, lo)) - f(lo)) / (f(hi) - f(lo))) * (b - a);
    const hair = document.createElementNS("http://www.w3.org/2000/svg", "line");
    hair.setAttribute("class", "hair");
    hair.setAttribute("y1", top);
    hair.setAttribute("y2", bottom);
    hair.style.display = "none";
    svg.appendChild(hair);
    svg.addEventListener("mousemove", (e) => {
      const box = svg.getBoundingClientRect(), k = svg.viewBox.baseVal.width / box.width;
      const x = (e.clientX - box.left) * k, y = (e.clientY - box.top) * k;
      if (x < a || x > b || y < top - 6 || y > bottom + 6) { hair.style.display = "none"; hide(); return; }
      const v = g(f(lo) + ((x - a) / (b - a)) * (f(hi) - f(lo)));
      const rows = [];
      c.s.forEach((s, i) => {
        const key = svg.querySelector('.key[data-series="' + i + '"]');
        if ((key && key.classList.contains("off")) || !s.p.length) return;
        let l = 0, r = s.p.length - 1;
        while (l < r) { const m = (l + r + 1) >> 1; if (s.p[m][0] <= v) l = m; else r = m - 1; }
        let val = s.p[l][1];
        if (v < s.p[0][0]) { if (kind === "time" || /share/.test(c.yl) === false) return; val = 0; }
        else if (!s.st && l < s.p.length - 1) {
          const [x0, y0] = s.p[l], [x1, y1] = s.p[l + 1], t = (f(Math.max(v, 1e-9)) - f(Math.max(x0, 1e-9))) / (f(Math.max(x1, 1e-9)) - f(Math.max(x0, 1e-9)) || 1);
          if (scale !== "log" || x0 > 0) val = y0 + Math.min(Math.max(t, 0), 1) * (y1 - y0);
        }
        rows.push('<div><i style="background:' + s.c + '"></i>' + safe(s.l) + ": " + num(val) + (/%/.test(c.yl) ? " %" : "") + "</div>");
      });
      hair.setAttribute("x1", px(v));
      hair.setAttribute("x2", px(v));
      hair.style.display = "";
      if (rows.length) show("<b>" + safe(word(kind, v)) + "</b>" + rows.join(""), e);
    });
    svg.addEventListener("mouseleave", () => { hair.style.display = "none"; hide(); });
  }
  for (const button of document.querySelectorAll(".panel button")) {
    button.addEventListener("click", () => {
      const svg = button.parentElement.querySelector("svg").cloneNode(true);
      for (const h of svg.querySelectorAll(".hair")) h.remove();
      svg.removeAttribute("data-chart");
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([svg.outerHTML], { type: "image/svg+xml" }));
      link.download = button.dataset.name + ".svg";
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.dataset.was = d.open ? "1" : ""; d.open = true; }));
  addEventListener("afterprint", () => document.querySelectorAll("details").forEach((d) => { d.open = d.dataset.was === "1"; }));
})();

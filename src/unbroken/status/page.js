// Hover on the two figures; without it the page says the same, so that nothing depends on scripts.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);

  function place(figure, svg, tip, event, text) {
    tip.textContent = text;
    tip.style.display = "block";
    const box = figure.getBoundingClientRect();
    const left = event.clientX - box.left + 14;
    tip.style.left = Math.min(left, box.width - tip.offsetWidth - 4) + "px";
    tip.style.top = Math.max(0, event.clientY - box.top - tip.offsetHeight - 10) + "px";
  }

  // The nearest index of a rising list.
  function nearest(list, value) {
    let low = 0, high = list.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (list[middle] < value) low = middle; else high = middle;
    }
    return Math.abs(list[low] - value) <= Math.abs(list[high] - value) ? low : high;
  }

  function follow(id, describe) {
    const figure = document.getElementById(id);
    if (!figure) return;
    const svg = figure.querySelector("svg"), tip = figure.querySelector(".tip");
    const leave = () => { tip.style.display = "none"; describe(null, svg); };
    svg.addEventListener("mouseleave", leave);
    svg.addEventListener("mousemove", (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const text = describe(at, svg);
      if (text) place(figure, svg, tip, event, text); else leave();
    });
  }

  const c = data.curve;
  follow("curve", (at, svg) => {
    const cross = svg.querySelector(".cross"), dot = svg.querySelector(".dot");
    const inside = at && c.step.length && at.x >= c.x[0] - 4 && at.x <= c.x[1] + 4;
    cross.style.display = dot.style.display = inside ? "" : "none";
    if (!inside) return "";
    const step = c.range[0] + (at.x - c.x[0]) / (c.x[1] - c.x[0]) * (c.range[1] - c.range[0]);
    const i = nearest(c.step, step);
    const x = c.x[0] + (c.step[i] - c.range[0]) / (c.range[1] - c.range[0]) * (c.x[1] - c.x[0]);
    cross.setAttribute("x1", x); cross.setAttribute("x2", x);
    dot.setAttribute("cx", x); dot.setAttribute("cy", c.py[i]);
    return `step ${c.step[i].toLocaleString("en")}\nloss ${c.loss[i]}\nattempt ${c.attempt[i]}, after ${c.at[i]}`;
  });

  const t = data.timeline;
  follow("timeline", (at) => {
    const span = at && t.spans.find((s) => at.x >= s[1] && at.x <= Math.max(s[2], s[1] + 0.6));
    return span ? span[3] : "";
  });

  const all = document.querySelectorAll("details");
  addEventListener("beforeprint", () => all.forEach((d) => { d.dataset.was = d.open ? "1" : ""; d.open = true; }));
  addEventListener("afterprint", () => all.forEach((d) => { d.open = d.dataset.was === "1"; }));
})();

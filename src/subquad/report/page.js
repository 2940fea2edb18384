"use strict";
(() => {
  const { specs, themes } = JSON.parse(document.getElementById("specs").textContent);
  const isDark = matchMedia("(prefers-color-scheme: dark)");
  const hidden = new Set();
  const kinds = {};
  const views = {};

  const show = (name) => {
    if (!views[name]) return; // not drawn yet; it will be as the choices are by then
    views[name].signal("hidden", [...hidden]);
    if (name in kinds) views[name].signal("kind", kinds[name]);
    return views[name].runAsync();
  };

  const draw = async (box) => {
    const name = box.dataset.chart;
    const mode = isDark.matches ? "dark" : "light";
    if (views[name]) views[name].finalize();
    const actions = { export: true, source: false, compiled: false, editor: false };
    const options = { config: themes[mode], renderer: "svg", actions, tooltip: { theme: mode }, downloadFileName: name };
    options.logLevel = 1; // errors only; a layer left empty by the selection is not an error
    views[name] = (await vegaEmbed(box, structuredClone(specs[name]), options)).view;
    await show(name);
    box.dataset.mode = mode;
  };

  const boxes = [...document.querySelectorAll("[data-chart]")];
  const drawAll = async () => {
    for (const box of boxes) await draw(box);
  };
  let drawing = drawAll();
  isDark.addEventListener("change", () => {
    drawing = drawing.then(drawAll);
  });

  const mark = async () => {
    for (const button of document.querySelectorAll("[data-method]")) {
      button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.method)));
    }
    for (const name in views) await show(name);
  };
  const methods = [...new Set([...document.querySelectorAll("[data-method]")].map((button) => button.dataset.method))];
  for (const button of document.querySelectorAll("[data-method]")) {
    button.addEventListener("click", () => {
      const method = button.dataset.method;
      if (!hidden.delete(method)) hidden.add(method);
      mark();
    });
  }
  for (const button of document.querySelectorAll("[data-all]")) {
    button.addEventListener("click", () => {
      hidden.clear();
      if (button.dataset.all === "hide") for (const method of methods.slice(1)) hidden.add(method);
      mark();
    });
  }
  for (const input of document.querySelectorAll("input[type=radio]")) {
    input.addEventListener("change", () => {
      kinds[input.name] = input.value;
      show(input.name);
    });
  }

  const compare = (a, b, direction) => {
    const [x, y] = [a, b].map((cell) => cell.dataset.key);
    if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
    const [n, m] = [Number(x), Number(y)];
    return direction * (Number.isNaN(n) || Number.isNaN(m) ? x.localeCompare(y) : n - m);
  };
  for (const heading of document.querySelectorAll("thead th")) {
    heading.querySelector("button").addEventListener("click", () => {
      const direction = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of heading.parentElement.children) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      const body = heading.closest("table").tBodies[0];
      const column = heading.cellIndex;
      body.append(...[...body.rows].sort((a, b) => compare(a.cells[column], b.cells[column], direction)));
    });
  }
})();

// Replaces each static picture by a chart of uPlot that can be zoomed, and makes the tables searchable.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const smooth = document.getElementById("smooth"), log = document.getElementById("log");
  const plots = [];
  document.querySelectorAll(".controls").forEach((one) => { one.hidden = false; });

  const smoothed = (values, weight) => {
    let last = null, scale = 0;
    return values.map((value) => {
      if (value == null) return null;
      last = last == null ? value * (1 - weight) : last * weight + value * (1 - weight);
      scale = scale * weight + (1 - weight);
      return last / scale;
    });
  };

  // Lines with positions of their own, on one axis.
  const table = (chart) => {
    const weight = smooth && chart.kind === "curve" ? Number(smooth.value) : 0;
    const lines = chart.lines.map(([x, y]) => [x, weight ? smoothed(y, weight) : y]);
    if (chart.span) lines.push([[...new Set(chart.span)], [...new Set(chart.span)].map(() => null)]);
    const filled = lines.map((line) => line[0].length ? line : [[0], [null]]);
    const joined = uPlot.join(filled, filled.map((line) => line[1].map(() => 1)));
    return chart.span ? joined.slice(0, -1) : joined;
  };

  const drawMarks = (marks) => (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const mark of marks) {
      const x = plot.valToPos(mark.x, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = color("--" + mark.kind);
      ctx.setLineDash([4, 3]);
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      ctx.beginPath(); ctx.moveTo(x - 5, bbox.top); ctx.lineTo(x + 5, bbox.top); ctx.lineTo(x, bbox.top + 8); ctx.fill();
    }
    ctx.restore();
  };

  const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });

  const draw = (element) => {
    const chart = data.charts[element.dataset.chart], curve = chart.kind === "curve", timeline = chart.kind === "timeline";
    const labels = curve ? data.runs : chart.labels;
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
    const scaleOf = (label) => timeline && label === "step" ? "step" : "y";
    const width = Math.max(element.clientWidth, 200);
    const options = {
      width, height: curve ? 220 : 240,
      scales: { x: { time: !curve }, y: { distr: curve && log && log.checked ? 3 : 1 } },
      series: [curve ? { label: "step" } : { label: "time", value: (_, time) => time == null ? "--" : clock(time) }, ...labels.map((label, n) => ({
        label, scale: scaleOf(label), stroke: color("--r" + (n % 6)), width: 1.5,
        value: (_, value) => value == null ? "--" : String(Number(value.toPrecision(6))),
        points: { show: chart.lines[n][0].length < 2 ? true : undefined } }))],
      axes: [curve ? axis : { ...axis, space: 80, values: (_, times) => times.map(clock) }, { ...axis, size: 62 }, ...(timeline && labels.includes("step")
        ? [{ ...axis, scale: "step", side: 1, grid: { show: false } }] : [])],
      cursor: { sync: curve ? { key: "curves" } : undefined },
      hooks: { draw: timeline ? [drawMarks(data.marks[chart.run])] : [] },
    };
    if (timeline && !labels.includes("goodput")) options.axes.splice(1, 1);
    element.textContent = "";
    const plot = new uPlot(options, table(chart), element);
    plots.push({ plot, element, chart });
  };

  const zoom = ({ plot }, factor, shift) => {
    const { min, max } = plot.scales.x, middle = (min + max) / 2 + shift * (max - min), half = (max - min) / 2 * factor;
    plot.setScale("x", { min: middle - half, max: middle + half });
  };
  const keys = { "+": [0.5, 0], "=": [0.5, 0], "-": [2, 0], ArrowLeft: [1, -0.2], ArrowRight: [1, 0.2] };
  document.querySelectorAll(".chart").forEach((element) => {
    draw(element);
    element.tabIndex = 0;
    element.setAttribute("role", "group");
    element.setAttribute("aria-label", element.closest("figure").dataset.name);
    element.addEventListener("keydown", (event) => {
      const own = plots.find((one) => one.element === element);
      if (keys[event.key]) zoom(own, ...keys[event.key]);
      else if (event.key === "0" || event.key === "Escape") own.plot.setData(own.plot.data);
      else return;
      event.preventDefault();
    });
  });

  const again = () => {
    const elements = plots.map((one) => { one.plot.destroy(); return one.element; });
    plots.length = 0;
    elements.forEach(draw);
  };
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; again(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  smooth?.addEventListener("input", () => plots.forEach(({ plot, chart }) => {
    if (chart.kind === "curve") plot.setData(table(chart), false);
  }));
  smooth?.addEventListener("input", () => plots.forEach(({ plot, chart }) => { if (chart.kind === "curve") plot.redraw(); }));
  log?.addEventListener("change", again);
  document.getElementById("reset")?.addEventListener("click", () => plots.forEach(({ plot }) => plot.setData(plot.data)));

  const filter = (input, rows, text) => document.getElementById(input)?.addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase();
    document.querySelectorAll(rows).forEach((row) => { row.hidden = !text(row).toLowerCase().includes(wanted); });
  });
  filter("find", ".charts figure", (figure) => figure.dataset.name);
  filter("search", "#settings tbody tr", (row) => row.textContent);
})();

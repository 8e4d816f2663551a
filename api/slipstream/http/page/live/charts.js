// Numbers as pictures in SVG: the last minute as lines, the last second as two lanes.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 60;
const LANE = 26;
const GAP = 8;

// Lines over time. lines: as many values to a sample, null where there was none.
export class Spark {
  #svg;
  #lines;
  #area;
  #spanMs;

  constructor(svg, numLines, spanMs) {
    this.#svg = svg;
    this.#spanMs = spanMs;
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    this.#area = path(svg, "area");
    this.#lines = Array.from({ length: numLines }, (_, index) => path(svg, `line line-${index}`));
  }

  // samples: [{at, values}], oldest first; at in ms. Says what its top stands for.
  draw(samples, now) {
    const all = samples.flatMap((sample) => sample.values).filter((value) => value !== null);
    const top = roundUp(Math.max(...all, 0));
    const x = (at) => (WIDTH * (1 - (now - at) / this.#spanMs)).toFixed(1);
    const y = (value) => (HEIGHT - 1.5 - ((HEIGHT - 4) * value) / top).toFixed(1);
    this.#lines.forEach((line, index) => {
      let d = "";
      let isDown = false;
      for (const { at, values } of samples) {
        const value = values[index];
        if (value !== null) d += `${isDown ? "L" : "M"}${x(at)} ${y(value)}`;
        isDown = value !== null;
      }
      line.setAttribute("d", d);
      if (index > 0) return;
      const points = samples.filter(({ values }) => values[0] !== null);
      const isWhole = points.length > 1 && points.length === samples.length;
      const [from, to] = [points[0], points.at(-1)];
      this.#area.setAttribute(
        "d",
        isWhole ? `${d}L${x(to.at)} ${HEIGHT}L${x(from.at)} ${HEIGHT}Z` : "",
      );
    });
    return top;
  }
}

// Engine steps above, worker's work below, on one clock.
export class Lanes {
  #odd;
  #even;
  #work;

  constructor(svg) {
    svg.setAttribute("viewBox", `0 0 1000 ${2 * LANE + GAP}`);
    svg.setAttribute("preserveAspectRatio", "none");
    path(svg, "grid").setAttribute(
      "d",
      [250, 500, 750].map((x) => `M${x} 0V${2 * LANE + GAP}`).join(""),
    );
    path(svg, "ground").setAttribute("d", rect(0, 1000, 0) + rect(0, 1000, LANE + GAP));
    [this.#even, this.#odd, this.#work] = ["step even", "step odd", "work"].map((kind) =>
      path(svg, kind),
    );
  }

  // steps: [[begin, end, rows]], work: [[begin, end]], in µs; shows from..to.
  draw(steps, work, from, to) {
    const scale = (at) => (1000 * (Math.min(Math.max(at, from), to) - from)) / (to - from);
    const drawn = (spans, row) =>
      spans
        .filter(([begin, end]) => end > from && begin < to)
        .map(([begin, end]) => rect(scale(begin), scale(end), row))
        .join("");
    // two shades in turn, so that steps without a gap can be told apart
    const parts = [[], []];
    steps.forEach((step, index) => parts[(index - steps.length) & 1].push(step));
    this.#even.setAttribute("d", drawn(parts[0], 0));
    this.#odd.setAttribute("d", drawn(parts[1], 0));
    this.#work.setAttribute("d", drawn(work, LANE + GAP));
  }
}

// How much of [from, to) spans cover, and how much of what `spans` cover `others` cover, too; µs.
// Both are sorted, and no two of the same kind overlap.
export function covered(spans, from, to) {
  return spans.reduce(
    (sum, [begin, end]) => sum + Math.max(0, Math.min(end, to) - Math.max(begin, from)),
    0,
  );
}

export function coveredBoth(spans, others, from, to) {
  return spans.reduce(
    (sum, [begin, end]) => sum + covered(others, Math.max(begin, from), Math.min(end, to)),
    0,
  );
}

function path(svg, kind) {
  const made = document.createElementNS(SVG, "path");
  made.setAttribute("class", kind);
  svg.append(made);
  return made;
}

function rect(from, to, top) {
  const left = from.toFixed(2);
  const right = Math.max(to, from + 0.4).toFixed(2);
  return `M${left} ${top}H${right}V${top + LANE}H${left}Z`;
}

// The next of 1, 2, 5, 10, 20, … times a power of ten.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((top) => top >= value * 0.999);
}

// Draws the rounds of an answer on a time axis.

import { seconds } from "./speed.js";

const SVG = "http://www.w3.org/2000/svg";
const TOP = 4;
const HEIGHT = 26;

function add(parent, tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// Returns the distance of the marks of the axis: 1, 2 or 5 times a power of ten, for at most eight marks.
export function axisStep(total) {
  const power = 10 ** Math.floor(Math.log10(total / 8));
  return power * [1, 2, 5, 10].find((factor) => factor * power * 8 >= total);
}

export function draw(svg, rounds) {
  svg.replaceChildren();
  const total = rounds.reduce((sum, r) => sum + r.draft_ms + r.verify_ms + r.overhead_ms, 0);
  if (!total) return;
  const width = svg.clientWidth || 600;
  svg.setAttribute("viewBox", `0 0 ${width} 58`);
  const x = (ms) => (ms / total) * width;
  let at = 0;
  for (const round of rounds) {
    const group = add(svg, "g", {});
    const start = at;
    for (const [name, ms] of [["draft", round.draft_ms], ["verify", round.verify_ms], ["rest", round.overhead_ms]]) {
      add(group, "rect", { class: name, x: x(at), y: TOP, width: Math.max(x(ms), 0), height: HEIGHT });
      at += ms;
    }
    if (width > 4 * rounds.length) add(group, "line", { x1: x(start), x2: x(start), y1: TOP, y2: TOP + HEIGHT });
    const what = `${round.accepted} of ${round.drafted} draft tokens accepted, ${at - start < 1000 ? `${(at - start).toFixed(1)} ms` : seconds(at - start)}`;
    add(group, "title", {}, what);
  }
  const step = axisStep(total);
  for (let ms = 0; ms <= total; ms += step) {
    add(svg, "line", { x1: x(ms), x2: x(ms), y1: TOP + HEIGHT, y2: TOP + HEIGHT + 5 });
    const anchor = ms === 0 ? "start" : x(ms) > width - 30 ? "end" : "middle";
    add(svg, "text", { x: x(ms), y: TOP + HEIGHT + 17, "text-anchor": anchor }, total < 1000 ? `${+ms.toFixed(1)} ms` : `${+(ms / 1000).toFixed(1)} s`);
  }
}

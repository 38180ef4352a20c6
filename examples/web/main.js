// The page: drawing, the answer, and the maps of heads.

import { drawMaps, drawOverlay, makeMaps } from "./heads.js";
import { load } from "./model.js";
import { SIDE, toLevels } from "./picture.js";

const element = (id) => document.getElementById(id);
const drawing = element("drawing");
const strokes = [];
let model;
let result;

/** Draws with the pointer; `changed` is called at the end of each stroke. */
function listen(changed) {
  let pointer; // the one that draws: further fingers do not
  let line;
  const add = (event) => {
    const { left, top, width, height } = drawing.getBoundingClientRect();
    const inside = (share) => Math.min(Math.max(100 * share, 0), 100);
    strokes.at(-1).push([inside((event.clientX - left) / width), inside((event.clientY - top) / height)]);
    line.setAttribute("points", strokes.at(-1).join(" "));
  };
  drawing.addEventListener("pointerdown", (event) => {
    if (pointer !== undefined || event.button !== 0) return;
    pointer = event.pointerId;
    drawing.setPointerCapture(pointer);
    line = document.createElementNS(drawing.namespaceURI, "polyline");
    element("strokes").append(line);
    drawOverlay(element("overlay"));
    strokes.push([]);
    add(event);
    add(event); // a line needs two points: a click is a dot
  });
  drawing.addEventListener("pointermove", (event) => {
    if (event.pointerId !== pointer) return;
    const events = event.getCoalescedEvents?.() ?? [];
    (events.length > 0 ? events : [event]).forEach(add);
  });
  drawing.addEventListener("lostpointercapture", (event) => {
    if (event.pointerId !== pointer) return;
    pointer = undefined;
    changed();
  });
  element("clear").addEventListener("click", () => {
    if (pointer !== undefined) return;
    strokes.length = 0;
    element("strokes").replaceChildren();
    changed();
  });
}

/** A function that runs `work` until it has seen the latest change: onnxruntime-web runs one call at a time. */
function oneAtATime(work) {
  let running = false;
  let again = false;
  return async () => {
    again = true;
    if (running) return;
    running = true;
    while (again) {
      again = false;
      await work();
    }
    running = false;
  };
}

async function update() {
  if (strokes.length === 0) {
    show();
    return;
  }
  const { levels, frame } = toLevels(strokes);
  try {
    show({ ...(await model.run(levels)), levels, frame });
  } catch (error) {
    showProblem("The model cannot be run", error.message);
  }
}

/** Shows a result; without one, an empty page. */
function show(latest) {
  result = latest;
  const best = result ? result.probabilities.indexOf(Math.max(...result.probabilities)) : -1;
  element("class").textContent = result ? best : "–";
  element("class").title = model.labels[best] ?? "";
  element("certainty").textContent = result ? `${percent(result.probabilities[best])} sure` : "Nothing drawn yet";
  element("time").textContent = result ? `in ${result.milliseconds.toFixed(1)} ms` : "";
  [...element("probabilities").children].forEach((row, i) => {
    const share = result?.probabilities[i] ?? 0;
    row.classList.toggle("best", i === best);
    row.style.setProperty("--share", share);
    row.querySelector("span").textContent = result ? percent(share) : "";
  });
  element("picture").dataset.levels = result ? [...result.levels].join(" ") : "";
  document.body.classList.toggle("drawing", result !== undefined);
  document.body.style.setProperty("--picture", result ? `url(${imageOf(result.levels)})` : "none");
  drawMaps(element("layers"), model.layers, result);
  drawOverlay(element("overlay"));
}

const percent = (share) => `${Math.round(100 * share)} %`;

/** The levels as an image whose opacity is the ink's. */
function imageOf(levels) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = SIDE;
  const image = new ImageData(SIDE, SIDE);
  levels.forEach((level, i) => (image.data[4 * i + 3] = (level * 255) / 16));
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas.toDataURL();
}

try {
  model = await load();
  element("loading").hidden = true;
  element("page").hidden = false;
  element("probabilities").append(
    ...model.labels.map((label, i) => {
      const row = document.createElement("li");
      row.title = label;
      row.innerHTML = `<span></span><i></i><b>${i}</b>`;
      return row;
    }),
  );
  makeMaps(element("layers"), model.layers, (map) => drawOverlay(element("overlay"), map, result?.frame));
  show();
  listen(oneAtATime(update));
} catch (error) {
  showProblem(error.title ?? "The page does not work", error.message, error.command);
  if (!error.title) throw error;
}

// Maps of heads: for each head of each layer, which patches of the picture use it, and how much.

/** Makes an empty map for each head. `chosen` is called with the map that the pointer or the keyboard's focus is on, or with none. */
export function makeMaps(container, layers, chosen) {
  container.replaceChildren(
    ...layers.map(({ name, heads, shared }) => {
      const row = make("div", "layer");
      const title = make("div", "name");
      title.append(make("h3", "", name), make("p"));
      const maps = make("div", "maps");
      for (let head = 0; head < heads; head++) {
        const figure = make("figure", head < shared ? "shared" : "routed");
        const map = make("div", "map");
        map.tabIndex = 0;
        map.setAttribute("role", "img");
        map.append(svg("svg", { class: "patches", viewBox: "0 0 1 1" }), svg("svg", { class: "drawn", preserveAspectRatio: "none" }));
        map.lastChild.append(svg("use", { href: "#strokes" }));
        figure.append(map, make("figcaption"));
        for (const event of ["pointerenter", "focus"]) map.addEventListener(event, () => chosen(figure));
        for (const event of ["pointerleave", "blur"]) map.addEventListener(event, () => chosen());
        maps.append(figure);
      }
      row.append(title, maps);
      return row;
    }),
  );
}

/** Draws the patches that use each head, and the drawing's part `frame` on top; without a result, empty maps. */
export function drawMaps(container, layers, { gates, frame } = {}) {
  layers.forEach(({ name, heads, shared }, layer) => {
    const row = container.children[layer];
    const routed = heads - shared;
    const largest = Math.max(...(gates?.[layer].values ?? []));
    let used = 0;
    row.querySelectorAll("figure").forEach((figure, head) => {
      const side = gates?.[layer].side ?? 0;
      const patches = Array.from({ length: side * side }, (_, i) => {
        const gate = gates[layer].values[i * heads + head];
        return patch(i, side, gate, gate / largest);
      });
      const count = patches.filter((rect) => rect.classList.contains("used")).length;
      used += count;
      figure.querySelector(".patches").replaceChildren(...patches);
      if (frame) figure.querySelector(".drawn").setAttribute("viewBox", `${frame.x} ${frame.y} ${frame.width} ${frame.height}`);
      figure.querySelector("figcaption").textContent = gates ? `${Math.round((100 * count) / side ** 2)} %` : "";
      const kind = head < shared ? "shared" : "routed";
      const label = `${name}, head ${head + 1}, ${kind}`;
      const map = figure.querySelector(".map");
      map.setAttribute("aria-label", gates ? `${label}: used by ${count} of ${side * side} patches` : label);
      map.title = map.getAttribute("aria-label");
    });
    const side = gates?.[layer].side;
    const kinds = routed > 0 ? [`${shared} shared heads,`, `${routed} routed`] : [`${shared} shared heads`];
    const use = [`${side} × ${side} patches,`, `${used / side ** 2} of ${heads} heads each`];
    row.querySelector("p").textContent = (gates ? use : kinds).map(phrase).join(" ");
  });
}

/** Shows a map's patches on the drawing, whose part `frame` is the picture; without a map, nothing. */
export function drawOverlay(overlay, figure, frame) {
  if (!figure || !frame) {
    overlay.replaceChildren();
    return;
  }
  const patches = svg("svg", { ...frame, viewBox: "0 0 1 1", preserveAspectRatio: "none" });
  patches.append(...figure.querySelector(".patches").cloneNode(true).children);
  overlay.setAttribute("class", figure.className);
  overlay.replaceChildren(patches);
}

function patch(i, side, gate, strength) {
  const gap = Math.min(0.006, 0.04 / side);
  const size = 1 / side - 2 * gap;
  const rect = svg("rect", { x: (i % side) / side + gap, y: Math.floor(i / side) / side + gap, width: size, height: size });
  if (gate !== 0) {
    rect.classList.add("used");
    rect.style.opacity = 0.3 + 0.7 * Math.sqrt(Math.max(strength, 0));
  }
  return rect;
}

/** Text that is not broken into lines. */
const phrase = (text) => text.replaceAll(" ", "\u00a0");

function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function make(tag, className = "", text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}

// Turns a drawing into a picture like those that the model was trained on, the Optical Recognition of Handwritten Digits of UCI: digits of
// equal height in the middle of 32 x 32 black or white pixels, their strokes as thick as it takes for all to have about the same number of
// white pixels. A level is the number of white pixels in a square of 4 x 4, so a picture is 8 x 8 levels of 0 to 16.

const GRID = 32;
const BLOCK = 4;
// Size and white pixels of an average digit of that set.
const BOX = { width: 22, height: 32 };
const INK = 314;
// How much wider or narrower than drawn a digit may become. A 1 is not stretched to the width of an 8.
const MAX_STRETCH = 1.3;
const MIN_RADIUS = 0.5;
const MAX_RADIUS = 5;

export const SIDE = GRID / BLOCK;

/**
 * The 8 x 8 levels of a drawing, row by row.
 *
 * @param {[number, number][][]} strokes points of the pen, in any unit; y grows downwards
 * @returns {{levels: Uint8Array, frame: {x: number, y: number, width: number, height: number}}} the levels, and the part of the drawing
 *     that they cover, in its unit
 */
export function toLevels(strokes) {
  const bounds = boundsOf(strokes);
  let thin = MIN_RADIUS;
  let thick = MAX_RADIUS;
  for (let step = 0; step < 8; step++) {
    const radius = (thin + thick) / 2;
    const white = rasterize(strokes, fit(bounds, radius), radius).reduce((sum, pixel) => sum + pixel, 0);
    if (white < INK) thin = radius;
    else thick = radius;
  }
  const view = fit(bounds, thin);
  const pixels = rasterize(strokes, view, thin);
  const levels = new Uint8Array(SIDE * SIDE);
  pixels.forEach((pixel, i) => {
    const row = Math.floor(i / GRID / BLOCK);
    const column = Math.floor((i % GRID) / BLOCK);
    levels[row * SIDE + column] += pixel;
  });
  const [width, height] = [GRID / view.scaleX, GRID / view.scaleY];
  return { levels, frame: { x: view.x - width / 2, y: view.y - height / 2, width, height } };
}

/** The levels as the model's input, (3, size, size): scaled bilinearly, from -1 to 1, in three equal channels. */
export function toPixels(levels, size = 64) {
  const places = Array.from({ length: size }, (_, i) => {
    const at = Math.max(((i + 0.5) * SIDE) / size - 0.5, 0);
    const low = Math.floor(at);
    return { low, high: Math.min(low + 1, SIDE - 1), share: at - low };
  });
  const plane = new Float32Array(size * size);
  places.forEach((y, row) =>
    places.forEach((x, column) => {
      const across = (line) => levels[line * SIDE + x.low] * (1 - x.share) + levels[line * SIDE + x.high] * x.share;
      plane[row * size + column] = (across(y.low) * (1 - y.share) + across(y.high) * y.share) / 8 - 1;
    }),
  );
  const pixels = new Float32Array(3 * plane.length);
  for (let channel = 0; channel < 3; channel++) pixels.set(plane, channel * plane.length);
  return pixels;
}

function boundsOf(strokes) {
  const points = strokes.flat();
  const [left, right] = extent(points.map(([x]) => x));
  const [top, bottom] = extent(points.map(([, y]) => y));
  // A dot has no size to scale.
  const least = 1e-3 * Math.max(right - left, bottom - top, 1);
  return {
    x: (left + right) / 2,
    y: (top + bottom) / 2,
    width: Math.max(right - left, least),
    height: Math.max(bottom - top, least),
  };
}

const extent = (numbers) => numbers.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);

/** Scales that fit what a pen of that radius draws within the bounds into the box. */
function fit({ x, y, width, height }, radius) {
  const across = (BOX.width - 2 * radius) / width;
  const down = (BOX.height - 2 * radius) / height;
  return { x, y, scaleX: Math.min(across, down * MAX_STRETCH), scaleY: Math.min(down, across * MAX_STRETCH) };
}

/** 32 x 32 pixels: 1 where the pixel's middle is within `radius` of a stroke. */
function rasterize(strokes, view, radius) {
  const pixels = new Uint8Array(GRID * GRID);
  const place = ([x, y]) => [(x - view.x) * view.scaleX + GRID / 2, (y - view.y) * view.scaleY + GRID / 2];
  for (const stroke of strokes) {
    const points = stroke.map(place);
    points.forEach((point, i) => line(pixels, points[Math.max(i - 1, 0)], point, radius));
  }
  return pixels;
}

function line(pixels, [x0, y0], [x1, y1], radius) {
  const [dx, dy] = [x1 - x0, y1 - y0];
  const square = dx * dx + dy * dy;
  const first = (a, b) => Math.max(Math.floor(Math.min(a, b) - radius), 0);
  const last = (a, b) => Math.min(Math.ceil(Math.max(a, b) + radius), GRID - 1);
  for (let row = first(y0, y1); row <= last(y0, y1); row++) {
    for (let column = first(x0, x1); column <= last(x0, x1); column++) {
      const [px, py] = [column + 0.5 - x0, row + 0.5 - y0];
      const along = square > 0 ? Math.min(Math.max((px * dx + py * dy) / square, 0), 1) : 0;
      if (Math.hypot(px - along * dx, py - along * dy) <= radius) pixels[row * GRID + column] = 1;
    }
  }
}

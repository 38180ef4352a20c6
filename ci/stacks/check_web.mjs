// Runs exported models with onnxruntime-web in Chromium: examples/web, drawn on with the mouse, and a language model.
//
// usage: node check_web.mjs MODULES VIT LLAMA [PICTURES]
//
// MODULES holds node_modules with onnxruntime-web, onnxruntime-node and playwright-core; VIT and LLAMA are exported folders, both float32,
// VIT with gates. Screenshots of the page are written to the folder PICTURES; screenshot.png is the one in examples/web.
// CHROMIUM is the browser (/usr/bin/chromium).

import { mkdirSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { dirname, extname, join, normalize, resolve } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

const [modules, vit, llama, pictures] = process.argv.slice(2).map((path) => resolve(path));
const root = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
const site = join(root, "examples/web");
const checkpoints = join(root, "examples/checkpoints");
const require = createRequire(join(modules, "package.json"));
const { chromium } = require("playwright-core");
const node = require("onnxruntime-node");
const { toPixels } = await import(pathToFileURL(join(site, "picture.js")));

const report = (name, passed, what) => {
  console.log(`${passed ? "ok  " : "FAIL"} onnxruntime-web ${name}: ${what}`);
  if (!passed) process.exitCode = 1;
};

// Control points of strokes in a box of 1 x 1, through which curves are drawn. The 7 has a bar, as in the training set.
const DIGITS = {
  0: [[[0.5, 0], [0.15, 0.2], [0.05, 0.5], [0.15, 0.8], [0.5, 1], [0.85, 0.8], [0.95, 0.5], [0.85, 0.2], [0.5, 0]]],
  1: [[[0.5, 0], [0.5, 0.5], [0.5, 1]]],
  2: [[[0.1, 0.25], [0.3, 0.03], [0.7, 0.03], [0.88, 0.28], [0.6, 0.62], [0.1, 1]], [[0.1, 1], [0.95, 1]]],
  3: [[[0.1, 0.1], [0.5, 0], [0.85, 0.2], [0.7, 0.42], [0.4, 0.47]], [[0.4, 0.47], [0.8, 0.55], [0.9, 0.78], [0.55, 1], [0.1, 0.92]]],
  4: [[[0.55, 0], [0.3, 0.35], [0.05, 0.65]], [[0.05, 0.65], [0.95, 0.65]], [[0.7, 0.3], [0.68, 1]]],
  5: [[[0.15, 0], [0.12, 0.42]], [[0.12, 0.42], [0.5, 0.36], [0.88, 0.6], [0.75, 0.92], [0.35, 1], [0.05, 0.9]], [[0.15, 0], [0.88, 0]]],
  6: [[[0.7, 0], [0.3, 0.25], [0.08, 0.65], [0.25, 0.97], [0.7, 0.97], [0.9, 0.72], [0.65, 0.5], [0.3, 0.55], [0.1, 0.72]]],
  7: [[[0.08, 0], [0.95, 0]], [[0.95, 0], [0.6, 0.45], [0.4, 1]], [[0.25, 0.5], [0.85, 0.5]]],
  8: [[[0.5, 0.47], [0.15, 0.25], [0.5, 0], [0.85, 0.22], [0.5, 0.47], [0.1, 0.75], [0.5, 1], [0.9, 0.75], [0.5, 0.47]]],
  9: [[[0.85, 0.2], [0.5, 0], [0.12, 0.22], [0.4, 0.5], [0.8, 0.35], [0.88, 0.15], [0.85, 0.6], [0.75, 1]]],
};
// Where on the drawing area a digit is drawn, and how large, as shares of it.
const PLACES = [
  { x: 0.5, y: 0.5, width: 0.48, height: 0.8 },
  { x: 0.28, y: 0.68, width: 0.3, height: 0.42 },
];

/** Points of a Catmull-Rom curve through the control points. */
function curve(control, steps = 6) {
  const at = (i) => control[Math.min(Math.max(i, 0), control.length - 1)];
  const points = [];
  for (let i = 0; i + 1 < control.length; i++) {
    for (let step = 0; step < steps; step++) {
      const t = step / steps;
      const mix = (axis) => {
        const [a, b, c, d] = [i - 1, i, i + 1, i + 2].map((k) => at(k)[axis]);
        return b + (t * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * b - a - 3 * c + d)))) / 2;
      };
      points.push([mix(0), mix(1)]);
    }
  }
  return [...points, control.at(-1)];
}

/** Serves the page with onnxruntime-web and the models, and a blank page; addresses in `missing` are answered with 404. */
async function serve() {
  const folders = { "/node_modules/": join(modules, "node_modules"), "/model/": vit, "/llama/": llama, "/": site };
  const types = { ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript" };
  const missing = new Set();
  const server = createServer((request, response) => {
    const path = normalize(decodeURIComponent(new URL(request.url, "http://localhost").pathname));
    const [prefix, folder] = Object.entries(folders).find(([prefix]) => path.startsWith(prefix));
    const file = join(folder, path.slice(prefix.length) || "index.html");
    try {
      if (path === "/blank") return response.writeHead(200, { "content-type": "text/html" }).end();
      if ([...missing].some((name) => path.endsWith(name))) throw new Error("missing");
      const body = readFileSync(file);
      response.writeHead(200, { "content-type": types[extname(file)] ?? "application/octet-stream" }).end(body);
    } catch {
      response.writeHead(404).end();
    }
  });
  await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
  return { server, folders, missing, address: `http://127.0.0.1:${server.address().port}/` };
}

/** The held-out digits: 8 x 8 levels and a label each. */
function heldOut() {
  const bytes = readFileSync(join(checkpoints, "digits-moh-vit/heldout.safetensors"));
  const start = 8 + Number(bytes.readBigUInt64LE(0));
  const header = JSON.parse(bytes.subarray(8, start));
  const tensor = (name) => [...bytes.subarray(...header[name].data_offsets.map((offset) => start + offset))];
  const levels = tensor("digits");
  return tensor("labels").map((label, i) => ({ label, levels: levels.slice(64 * i, 64 * i + 64) }));
}

/** Draws a digit with the mouse, and waits until it is classified. */
async function draw(page, digit, { x, y, width, height }) {
  await page.locator("#clear").focus();
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector("#picture").dataset.levels === "");
  const area = await page.locator("#drawing").boundingBox();
  for (const stroke of DIGITS[digit]) {
    const before = await page.locator("#picture").getAttribute("data-levels");
    const place = ([u, v]) => [area.x + area.width * (x + (u - 0.5) * width), area.y + area.height * (y + (v - 0.5) * height)];
    const points = curve(stroke).map(place);
    await page.mouse.move(...points[0]);
    await page.mouse.down();
    for (const point of points) await page.mouse.move(...point);
    await page.mouse.up();
    await page.waitForFunction((old) => document.querySelector("#picture").dataset.levels !== old, before);
  }
}

/** What the page shows: the picture, the class, and for each layer and head the patches that are coloured. */
const shown = (page) =>
  page.evaluate(() => ({
    levels: document.querySelector("#picture").dataset.levels.split(" ").map(Number),
    digit: Number(document.querySelector("#class").textContent),
    layers: [...document.querySelectorAll(".layer")].map((layer) =>
      [...layer.querySelectorAll("figure")].map((figure) => ({
        shared: figure.classList.contains("shared"),
        patches: [...figure.querySelectorAll(".map rect")].map((rect) => getComputedStyle(rect).fill !== "none"),
      })),
    ),
  }));

/** Class and used patches as onnxruntime for Node computes them. */
async function expected(session, levels) {
  const outputs = await session.run({ pixel_values: new node.Tensor("float32", toPixels(levels), [1, 3, 64, 64]) });
  const logits = [...outputs.logits.data];
  const layers = session.outputNames
    .filter((name) => name.startsWith("gates."))
    .map((name) => {
      const [, tokens, heads] = outputs[name].dims;
      const gate = (token, head) => outputs[name].data[token * heads + head];
      return Array.from({ length: heads }, (_, head) => Array.from({ length: tokens }, (_, token) => gate(token, head) !== 0));
    });
  return { digit: logits.indexOf(Math.max(...logits)), layers };
}

const { server, folders, missing, address } = await serve();
const profile = mkdtempSync(join(tmpdir(), "moh-web-"));
const browser = await chromium.launchPersistentContext(profile, {
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"].concat(
    ["--disable-component-update", "--disable-sync"],
  ),
  viewport: { width: 1120, height: 800 },
});
try {
  const page = await browser.newPage();
  const [requests, errors] = [[], []];
  page.on("request", (request) => requests.push(request.url()));
  page.on("pageerror", (error) => errors.push(error.message));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  await page.goto(address);
  await page.waitForSelector("#page:not([hidden]), #problem:not([hidden])");
  if (await page.isVisible("#problem")) throw new Error(await page.innerText("#problem"));

  const session = await node.InferenceSession.create(join(vit, "onnx/model.onnx"));
  const config = JSON.parse(readFileSync(join(vit, "config.json")));
  let [right, maps, alike, drawings] = [0, 0, 0, 0];
  const wrong = [];
  const times = [];
  for (const place of PLACES) {
    for (const digit of Object.keys(DIGITS).map(Number)) {
      await draw(page, digit, place);
      const seen = await shown(page);
      const reference = await expected(session, seen.levels);
      drawings += 1;
      if (seen.digit === digit) right += 1;
      else wrong.push(`${digit} as ${seen.digit}`);
      if (seen.digit !== reference.digit) wrong.push(`${digit} as ${reference.digit} in onnxruntime`);
      times.push(Number.parseFloat((await page.textContent("#time")).slice(3)));
      seen.layers.forEach((heads, layer) =>
        heads.forEach(({ shared, patches }, head) => {
          const same = JSON.stringify(patches) === JSON.stringify(reference.layers[layer]?.[head]);
          const stage = Number(session.outputNames.filter((name) => name.startsWith("gates."))[layer].match(/block(\d)/)[1]) - 1;
          maps += 1;
          alike += Number(same && shared === head < config.shared_head[stage]);
        }),
      );
    }
  }
  const median = times.sort((a, b) => a - b)[times.length >> 1];
  report("page", wrong.length === 0, [`${right} of ${drawings} drawn digits recognised, ${median} ms each`, ...wrong].join("; "));
  report("page", maps === drawings * 32 && alike === maps, `${alike} of ${maps} maps of heads equal those of onnxruntime`);

  const digits = heldOut();
  const best = await page.evaluate(async (pictures) => {
    const { run } = await (await import("/model.js")).load();
    const found = [];
    for (const levels of pictures) {
      const { probabilities } = await run(levels);
      found.push(probabilities.indexOf(Math.max(...probabilities)));
    }
    return found;
  }, digits.map(({ levels }) => levels));
  const correct = best.filter((digit, i) => digit === digits[i].label).length;
  const { val_accuracy } = JSON.parse(readFileSync(join(checkpoints, "digits-moh-vit/training.json")));
  const trained = Math.round(val_accuracy * digits.length);
  report("digits-moh-vit", correct === trained, `${correct} of ${digits.length} held-out digits right, ${trained} in PyTorch`);

  await drawWithFinger(page);
  if (pictures) await photograph(page);
  await page.locator("#clear").click();
  await page.waitForFunction(() => document.querySelectorAll("rect").length === 0);
  const elsewhere = requests.filter((url) => !url.startsWith(address) && !url.startsWith("data:"));
  report("page", elsewhere.length === 0, `${requests.length} requests, ${elsewhere.length} to other servers ${elsewhere.join(" ")}`);
  report("page", errors.length === 0, `${errors.length} errors in the console ${errors.join("; ")}`);

  await checkProblems(page);
  await checkText(page);
} finally {
  await browser.close();
  server.close();
  rmSync(profile, { recursive: true, force: true });
}

/** A 1, drawn by touch on a screen as wide as a phone's. */
async function drawWithFinger(page) {
  await page.setViewportSize({ width: 390, height: 800 });
  await page.locator("#clear").click();
  const client = await page.context().newCDPSession(page);
  const touch = (type, ...touchPoints) => client.send("Input.dispatchTouchEvent", { type, touchPoints });
  const area = await page.locator("#drawing").boundingBox();
  const x = area.x + area.width / 2;
  await client.send("Emulation.setTouchEmulationEnabled", { enabled: true });
  await touch("touchStart", { x, y: area.y + 30 });
  for (let y = 40; y < 260; y += 10) await touch("touchMove", { x, y: area.y + y });
  await touch("touchEnd");
  await client.send("Emulation.setTouchEmulationEnabled", { enabled: false });
  await page.waitForFunction(() => document.querySelector("#picture").dataset.levels !== "");
  const { digit } = await shown(page);
  const scrolls = await page.evaluate(() => scrollY > 0 || document.documentElement.scrollWidth > innerWidth);
  report("page", digit === 1 && !scrolls, `a 1 drawn with a finger is a ${digit}${scrolls ? ", and the page scrolls" : ""}`);
  await page.setViewportSize({ width: 1120, height: 800 });
}

/** The page in two themes and two widths, with a 3 drawn; empty; and with a map pointed at. */
async function photograph(page) {
  mkdirSync(pictures, { recursive: true });
  for (const [name, width] of [["phone", 390], ["desktop", 1000]]) {
    await page.setViewportSize({ width, height: 800 });
    await draw(page, 3, PLACES[0]);
    await page.mouse.move(0, 0);
    for (const colorScheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme });
      await page.screenshot({ path: join(pictures, `${name}-${colorScheme}.png`), fullPage: true });
    }
  }
  await page.emulateMedia({ colorScheme: null });
  await page.locator(".layer:nth-child(4) figure:nth-child(4) .map").hover();
  await page.locator("main").screenshot({ path: join(pictures, "screenshot.png") });
  await page.locator("#clear").click();
  await page.screenshot({ path: join(pictures, "empty.png"), fullPage: true });
  await page.setViewportSize({ width: 1120, height: 800 });
}

/** What the page says where a file is missing, with another model, and without a server or WebAssembly. */
async function checkProblems(page) {
  const cases = [
    ["/onnx/model.onnx", "model.onnx is missing", "moh-export"],
    ["/onnx/model.onnx_data", "model.onnx_data is missing", "moh-export"],
    ["/model/config.json", "config.json is missing", "moh-export"],
    ["/ort.wasm.min.mjs", "onnxruntime-web is not installed", "npm ci"],
    [".wasm", "ort-wasm-simd-threaded.wasm is missing", "npm ci"],
    ["/main.js", "The page's scripts cannot be loaded", ""],
    ["file:", "This page needs a web server", "http.server"],
  ];
  for (const [what, title, command] of cases) {
    missing.clear();
    missing.add(what);
    await page.goto(what === "file:" ? pathToFileURL(join(site, "index.html")).href : address);
    await page.waitForSelector("#page:not([hidden]), #problem:not([hidden])");
    const said = await page.textContent("#problem h2");
    const help = await page.textContent("#problem code");
    const good = said === title && help.includes(command) && (await page.isHidden("#page")) && (await page.isHidden("#loading"));
    report("page", good, `without ${what === "file:" ? "a server" : what}: "${said}"${help ? ", and a command" : ""}`);
    if (what === "/onnx/model.onnx" && pictures) await page.screenshot({ path: join(pictures, "problem.png") });
  }
  missing.clear();
  folders["/model/"] = llama;
  await page.goto(address);
  await page.waitForSelector("#problem:not([hidden])");
  const other = await page.textContent("#problem h2");
  report("page", other === "Another model than this page needs", `with a language model: "${other}"`);
  folders["/model/"] = vit;
  const old = await page.context().newPage();
  await old.addInitScript(() => delete globalThis.WebAssembly);
  await old.goto(address);
  await old.waitForSelector("#problem:not([hidden])");
  const said = await old.textContent("#problem h2");
  report("page", said === "No WebAssembly", `without WebAssembly: "${said}"`);
  await old.close();
}

/** Greedy tokens of the language model. */
async function checkText(page) {
  const training = JSON.parse(readFileSync(join(checkpoints, "shakespeare-moh-llama/training.json")));
  const tokens = training.greedy_ids;
  const { cut, prompt } = promptOf(training);
  await page.goto(new URL("blank", address).href);
  const { found, milliseconds } = await page.evaluate(generate, { prompt, count: tokens.length });
  const other = found.findIndex((token, i) => token !== tokens[i]);
  const equal = other < 0 ? found.length : other;
  const speed = (milliseconds / (tokens.length - cut)).toFixed(1);
  report("shakespeare-moh-llama", equal === tokens.length, `${equal} of ${tokens.length} tokens equal PyTorch's, ${speed} ms a token`);
}

/** The prompt's tokens: the first ones of the greedy tokens whose text is the prompt's. */
function promptOf({ prompt, greedy_ids }) {
  const { model } = JSON.parse(readFileSync(join(checkpoints, "shakespeare-moh-llama/tokenizer.json")));
  const text = Object.fromEntries(Object.entries(model.vocab).map(([piece, token]) => [token, piece]));
  let [cut, length] = [0, 0];
  while (length < prompt.length) length += text[greedy_ids[cut++]].length;
  return { cut, prompt: greedy_ids.slice(0, cut) };
}

/** Runs in the browser: the prompt's tokens, and the most likely ones after it, up to `count`. */
async function generate({ prompt, count }) {
  const ort = await import("/node_modules/onnxruntime-web/dist/ort.wasm.min.mjs");
  ort.env.wasm.numThreads = 1;
  const session = await ort.InferenceSession.create("/llama/onnx/model.onnx", {
    executionProviders: ["wasm"],
    externalData: [{ path: "model.onnx_data", data: "/llama/onnx/model.onnx_data" }],
  });
  const integers = (numbers) => new ort.Tensor("int64", BigInt64Array.from(numbers, BigInt), [1, numbers.length]);
  const caches = session.inputMetadata.filter(({ name }) => name.startsWith("past_key_values."));
  let past = Object.fromEntries(
    caches.map(({ name, shape }) => [name, new ort.Tensor("float32", [], [1, shape[1], 0, shape[3]])]),
  );
  const found = [...prompt];
  let next = prompt;
  const start = performance.now();
  while (found.length < count) {
    const first = found.length - next.length;
    const outputs = await session.run({
      input_ids: integers(next),
      attention_mask: integers(found.map(() => 1)),
      position_ids: integers(next.map((_, i) => first + i)),
      ...past,
    });
    const { data, dims } = outputs.logits;
    const last = data.subarray(data.length - dims[2]);
    next = [last.indexOf(Math.max(...last))];
    found.push(...next);
    past = Object.fromEntries(caches.map(({ name }) => [name, outputs[name.replace("past_key_values", "present")]]));
  }
  return { found, milliseconds: performance.now() - start };
}

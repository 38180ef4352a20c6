// Loads the exported model into onnxruntime-web, and runs it.

import { SIDE, toPixels } from "./picture.js";

const FOLDER = new URL("model/", import.meta.url);
const RUNTIME = new URL("node_modules/onnxruntime-web/dist/", import.meta.url);
const INSTALL = "npm ci --prefix examples/web";
const EXPORT = "moh-export examples/checkpoints/digits-moh-vit -o examples/web/model/model.onnx --for web --dtype f32 --output-gates";
const REPLACE = `${EXPORT} --force`;

/** Why the page cannot work, and the command that helps. */
export class Problem extends Error {
  constructor(title, message, command) {
    super(message);
    this.title = title;
    this.command = command;
  }
}

/**
 * @typedef {{name: string, heads: number, shared: number}} Layer the first `shared` heads are shared ones
 * @typedef {{probabilities: number[], gates: {side: number, values: Float32Array}[], milliseconds: number}} Result
 *     `gates` are those of each layer, (side * side patches, heads)
 *
 * @returns {Promise<{run: (levels: Uint8Array) => Promise<Result>, layers: Layer[], labels: string[]}>}
 * @throws {Problem}
 */
export async function load() {
  const ort = await runtime();
  const read = (name) => file(new URL(name, FOLDER));
  const [text, model, weights] = await Promise.all(["config.json", "onnx/model.onnx", "onnx/model.onnx_data"].map(read));
  const config = parse(text);
  let session;
  try {
    session = await ort.InferenceSession.create(model, {
      executionProviders: ["wasm"],
      externalData: [{ path: "model.onnx_data", data: weights }],
    });
  } catch (error) {
    throw new Problem("The model does not load", `onnxruntime-web said: ${error.message}`, REPLACE);
  }
  const layers = layersOf(session, config);
  const size = config.img_size;
  const run = async (levels) => {
    const start = performance.now();
    const pixels = new ort.Tensor("float32", toPixels(levels, size), [1, 3, size, size]);
    const outputs = await session.run({ pixel_values: pixels });
    const milliseconds = performance.now() - start;
    const gates = layers.map(({ output }) => ({ side: Math.sqrt(outputs[output].dims[1]), values: outputs[output].data }));
    return { probabilities: softmax(outputs.logits.data), gates, milliseconds };
  };
  await run(new Uint8Array(SIDE * SIDE)); // the first run is slower than others
  return { run, layers, labels: Object.values(config.id2label) };
}

async function runtime() {
  if (typeof WebAssembly !== "object") {
    throw new Problem("No WebAssembly", "The model runs in WebAssembly, which this browser lacks or has switched off.");
  }
  let ort;
  try {
    ort = await import(new URL("ort.wasm.min.mjs", RUNTIME));
  } catch {
    throw new Problem("onnxruntime-web is not installed", "The page found no node_modules/onnxruntime-web.", INSTALL);
  }
  const wasm = await file(new URL("ort-wasm-simd-threaded.wasm", RUNTIME), INSTALL);
  ort.env.wasm.wasmPaths = RUNTIME.href;
  ort.env.wasm.wasmBinary = wasm;
  ort.env.wasm.numThreads = 1; // several need headers that static servers do not send
  return ort;
}

async function file(url, command = EXPORT) {
  const name = url.pathname.split("/").at(-1);
  let response;
  try {
    response = await fetch(url);
  } catch (error) {
    throw new Problem(`${name} cannot be loaded`, `The server does not answer: ${error.message}.`);
  }
  if (!response.ok) {
    throw new Problem(`${name} is missing`, `The server has no ${url.pathname} (status ${response.status}).`, command);
  }
  return new Uint8Array(await response.arrayBuffer());
}

function parse(bytes) {
  try {
    return JSON.parse(new TextDecoder().decode(bytes));
  } catch (error) {
    throw new Problem("config.json cannot be read", `It is not JSON: ${error.message}.`, REPLACE);
  }
}

/** The layers by their outputs, such as gates.block3.0.attn: its stage is 3. Shared heads are the first ones of a layer. */
function layersOf(session, config) {
  const wrong = (message) => new Problem("Another model than this page needs", message, REPLACE);
  const [input] = session.inputMetadata;
  if (input.name !== "pixel_values" || !config.shared_head || !config.id2label) {
    throw wrong("It is not an image classifier of the family moh-vit with names for its classes.");
  }
  if (input.type !== "float32") throw wrong(`The page gives pictures in float32, and the model takes ${input.type}.`);
  const outputs = session.outputNames.filter((name) => name.startsWith("gates."));
  if (outputs.length === 0) throw wrong("The model was exported without --output-gates.");
  return outputs.map((output, i) => {
    const stage = Number(output.match(/block(\d+)/)[1]) - 1;
    return { output, name: `Layer ${i + 1}`, shared: config.shared_head[stage], heads: config.num_heads[stage] };
  });
}

function softmax(logits) {
  const largest = Math.max(...logits);
  const powers = Array.from(logits, (x) => Math.exp(x - largest));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((x) => x / sum);
}

// Runs exported folders with transformers.js in Node: a language model and an image classifier.
//
// usage: node check_transformers.mjs MODULES LLAMA VIT     (folders; MODULES holds node_modules)

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, dirname, join, resolve } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

const [modules, llama, vit] = process.argv.slice(2).map((path) => resolve(path));
const root = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
const require = createRequire(join(modules, "package.json"));
const { AutoModelForCausalLM, AutoTokenizer, RawImage, env, pipeline } = await import(
  pathToFileURL(require.resolve("@huggingface/transformers")).href
);

env.allowRemoteModels = false;
const at = (folder) => {
  env.localModelPath = dirname(folder);
  return basename(folder);
};
const report = (name, passed, what) => {
  console.log(`${passed ? "ok  " : "FAIL"} transformers.js ${name}: ${what}`);
  if (!passed) process.exit(1);
};

const training = JSON.parse(readFileSync(join(root, "examples/checkpoints/shakespeare-moh-llama/training.json")));
const tokenizer = await AutoTokenizer.from_pretrained(at(llama));
const model = await AutoModelForCausalLM.from_pretrained(at(llama), { dtype: "fp32" });
const expected = training.greedy_ids;
const outputs = await model.generate({ ...tokenizer(training.prompt), max_length: expected.length, do_sample: false });
const found = outputs.tolist()[0].map(Number);
const same = found.findIndex((token, i) => token !== expected[i]);
report(llama, same < 0 && found.length === expected.length, `${same < 0 ? found.length : same} of ${expected.length} tokens equal PyTorch's`);

const classify = await pipeline("image-classification", at(vit), { dtype: "fp32" });
const names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];
let right = 0;
for (const [digit, name] of names.entries()) {
  const picture = await RawImage.read(join(root, `examples/pictures/${digit}.png`));
  const [best] = await classify(picture, { top_k: 1 });
  right += Number(best.label === name);
}
report(vit, right === 10, `${right} of 10 pictures`);

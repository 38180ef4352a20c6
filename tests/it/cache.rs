//! Language models whose cache is updated in place: unequal sequences, padding on either side, room for more, and no copies.

use moh::{Runner, Tensors, floats, golden, greedy_in, read_tensors, runtimes, ways};
use moh_export::{Cache, Options};
use moh_operators::tolerance;
use moh_runtime::{Model, Tensor, Value};
use moh_tasks::generate::{GenerateOptions, LanguageModel, Prompts};
use moh_tasks::measure::{Phase, Runs, Workload};
use std::ops::ControlFlow;

fn in_place() -> Options {
    Options { cache: Some(Cache::InPlace), ..Options::default() }
}

fn matrix(rows: &[Vec<i64>]) -> Tensor {
    Tensor::new(vec![rows.len(), rows[0].len()], rows.concat()).unwrap()
}

/// A call, and what of its outputs is to be kept.
struct Calls<'r> {
    runner: &'r mut dyn Runner,
    cache: Tensors,
}

impl Calls<'_> {
    fn new(runner: &mut dyn Runner, batch: usize, capacity: usize) -> Calls<'_> {
        let empty = |(name, heads, dim): (String, usize, usize)| {
            let values = vec![f32::NAN; batch * heads * capacity * dim];
            (name, Tensor::new(vec![batch, heads, capacity, dim], values).unwrap())
        };
        let cache = runner.caches().into_iter().map(empty).collect();
        Calls { runner, cache }
    }

    /// The logits of every token, row by row.
    fn run(&mut self, ids: &[Vec<i64>], mask: &[Vec<i64>], first_positions: &[i64]) -> Vec<Vec<Vec<f32>>> {
        let positions: Vec<Vec<i64>> =
            first_positions.iter().map(|&first| (first..).take(ids[0].len()).collect()).collect();
        self.run_at(ids, mask, &positions)
    }

    fn run_at(&mut self, ids: &[Vec<i64>], mask: &[Vec<i64>], positions: &[Vec<i64>]) -> Vec<Vec<Vec<f32>>> {
        let mut inputs = std::mem::take(&mut self.cache);
        inputs.insert("input_ids".to_owned(), matrix(ids));
        inputs.insert("attention_mask".to_owned(), matrix(mask));
        inputs.insert("position_ids".to_owned(), matrix(positions));
        let outputs = self.runner.run(&inputs);
        let logits = floats(&outputs["logits"]);
        let vocabulary = outputs["logits"].shape()[2];
        let present = outputs.into_iter().filter(|(name, _)| name.starts_with("present."));
        self.cache = present.map(|(name, value)| (name.replacen("present", "past_key_values", 1), value)).collect();
        logits
            .chunks(vocabulary * ids[0].len())
            .map(|row| row.chunks(vocabulary).map(<[f32]>::to_vec).collect())
            .collect()
    }
}

fn close(way: &str, what: &str, found: &[f32], expected: &[f32]) {
    let error = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(found.len() == expected.len() && found.iter().all(|x| x.is_finite()), "{way}: {what}");
    assert!(error <= tolerance::GOLDEN_F32, "{way}: {what}: off by {error}");
}

/// Rows padded on the right, as onnxruntime-genai's Engine gives them: a prompt in two chunks, then a token each.
#[test]
fn sequences_of_unequal_length_are_computed_as_each_alone() {
    let (folder, target) = (golden("llama-moh-tiny"), tempfile::tempdir().unwrap());
    let prompts: [Vec<i64>; 2] = [vec![3, 1, 4, 1, 5, 9, 2], vec![6, 5, 3, 5]];
    for (way, mut runner) in ways(&folder, target.path(), &in_place()) {
        let mut alone = Vec::new();
        for prompt in &prompts {
            let ones = vec![1; prompt.len()];
            alone.push(Calls::new(runner.as_mut(), 1, 0).run(std::slice::from_ref(prompt), &[ones], &[0]).remove(0));
        }
        for capacity in [0, 7, 20] {
            let mut calls = Calls::new(runner.as_mut(), 2, capacity);
            // Three tokens each, then four of which the second row has none but one.
            let chunk =
                |from: usize, to: usize| prompts.clone().map(|p| p[from.min(p.len())..to.min(p.len())].to_vec());
            let first = calls.run(&chunk(0, 3), &[vec![1; 3], vec![1; 3]], &[0, 0]);
            let [long, mut short] = chunk(3, 7);
            short.resize(4, 0);
            let mask = [vec![1; 7], vec![1, 1, 1, 1, 0, 0, 0]];
            let second = calls.run(&[long, short], &mask, &[3, 3]);
            for row in 0..2 {
                for (token, expected) in alone[row].iter().enumerate() {
                    let found = if token < 3 { &first[row][token] } else { &second[row][token - 3] };
                    close(&way, &format!("row {row}, token {token}, capacity {capacity}"), found, expected);
                }
            }
            // The padding of the second row is written over.
            let mask = [vec![1; 8], vec![1, 1, 1, 1, 1, 0, 0, 0]];
            let third = calls.run(&[vec![8], vec![7]], &mask, &[7, 4]);
            for (row, next) in [(0, 8), (1, 7)] {
                let whole: Vec<i64> = prompts[row].iter().copied().chain([next]).collect();
                let ones = vec![1; whole.len()];
                let expected = Calls::new(calls.runner, 1, 0).run(&[whole], &[ones], &[0]).remove(0).pop().unwrap();
                close(&way, &format!("row {row}, next token, capacity {capacity}"), &third[row][0], &expected);
            }
        }
    }
}

/// A mask that is wider than there are tokens makes room for more, in rows that are padded on the left too.
#[test]
fn a_wider_mask_makes_a_larger_cache() {
    let (folder, target) = (golden("llama-moh-tiny"), tempfile::tempdir().unwrap());
    for (way, mut runner) in ways(&folder, target.path(), &in_place()) {
        let ids = [vec![3, 1, 4, 1], vec![0, 0, 9, 2]];
        let mask = [vec![1; 4], vec![0, 0, 1, 1]];
        let step = |runner: &mut dyn Runner, room: usize| {
            let mut calls = Calls::new(runner, 2, 0);
            calls.run(&ids, &mask, &[0, 1]);
            let wide = |mask: &Vec<i64>| mask.iter().copied().chain([1]).chain(vec![0; room]).collect::<Vec<i64>>();
            let logits = calls.run(&[vec![5], vec![6]], &mask.clone().map(|mask| wide(&mask)), &[4, 2]);
            let length = calls.cache.values().next().unwrap().shape()[2];
            (logits, length)
        };
        let (narrow, of_tokens) = step(runner.as_mut(), 0);
        let (wide, of_room) = step(runner.as_mut(), 6);
        assert_eq!((of_tokens, of_room), (5, 11), "{way}");
        for row in 0..2 {
            close(&way, &format!("row {row}"), &wide[row][0], &narrow[row][0]);
        }
    }
}

/// A prompt that is padded on the left, read at once or in parts, and its next token, where the mask has room from the start.
#[test]
fn prompts_padded_on_the_left_may_have_room() {
    let (folder, target) = (golden("llama-moh-tiny"), tempfile::tempdir().unwrap());
    let prompts: [Vec<i64>; 3] = [vec![3, 1, 4, 1, 5], vec![9, 2, 6], vec![5]];
    for (way, mut runner) in ways(&folder, target.path(), &in_place()) {
        let mut alone = Vec::new();
        for prompt in &prompts {
            let whole: Vec<i64> = prompt.iter().copied().chain([8]).collect();
            let ones = vec![1; whole.len()];
            alone.push(Calls::new(runner.as_mut(), 1, 0).run(&[whole], &[ones], &[0]).remove(0));
        }
        // Positions of padding are 1 in transformers, and 0 elsewhere.
        for (room, parts, fill) in [(1, 1, 1), (7, 1, 1), (7, 1, 0), (7, 2, 1), (0, 2, 0)] {
            let mut calls = Calls::new(runner.as_mut(), 3, 0);
            let row = |prompt: &Vec<i64>| [vec![-1; 5 - prompt.len()], prompt.clone(), vec![8]].concat();
            let rows = prompts.each_ref().map(row);
            let mut found = vec![Vec::new(); 3];
            for range in [vec![0..5, 5..6], vec![0..3, 3..5, 5..6]][parts - 1].iter().cloned() {
                let total = range.end;
                let ids =
                    rows.each_ref().map(|row| row[range.clone()].iter().map(|&id| id.max(0)).collect::<Vec<i64>>());
                let mask = rows.each_ref().map(|row| {
                    let open = row[..total].iter().map(|&id| i64::from(id >= 0));
                    open.chain(vec![0; room]).collect::<Vec<i64>>()
                });
                let positions = rows.each_ref().map(|row| {
                    let padding = row.iter().filter(|&&id| id < 0).count();
                    range.clone().map(|i| i.checked_sub(padding).map_or(fill, |i| i as i64)).collect::<Vec<i64>>()
                });
                let logits = calls.run_at(&ids, &mask, &positions);
                found.iter_mut().zip(logits).for_each(|(found, logits)| found.extend(logits));
            }
            for (row, expected) in alone.iter().enumerate() {
                let padding = found[row].len() - expected.len();
                for (token, expected) in expected.iter().enumerate() {
                    let what = format!("row {row}, token {token}, room {room}, {parts} parts, positions {fill}");
                    close(&way, &what, &found[row][padding + token], expected);
                }
            }
        }
    }
}

/// What the published code generates, in caches with more room than tokens that hold NaN at first.
#[test]
fn golden_tokens_in_a_cache_with_room() {
    for case in ["llama-moh-tiny", "switchhead-tiny"] {
        tokens_in_a_cache_with_room(case);
    }
}

fn tokens_in_a_cache_with_room(case: &str) {
    let (folder, target) = (golden(case), tempfile::tempdir().unwrap());
    let reference = read_tensors(&folder.join("reference.safetensors"));
    let steps = reference["generated_logits"].shape()[1];
    for (way, mut runner) in ways(&folder, target.path(), &in_place()) {
        for prefix in ["", "padded."] {
            let get = |name: &str| &reference[&format!("{prefix}{name}")];
            for capacity in [0, 64] {
                let (found, _) = greedy_in(runner.as_mut(), get("input_ids"), get("attention_mask"), steps, capacity);
                assert_eq!(
                    found.concat(),
                    get("generated_ids").as_slice::<i64>().unwrap(),
                    "{way} {prefix} {capacity}"
                );
            }
        }
    }
}

fn address(value: &Value) -> *const f32 {
    value.as_slice::<f32>().unwrap().as_ptr()
}

/// A generation that outgrows its cache's first capacity, prompt and 1024 tokens, against caches that have room for all from the start.
#[test]
fn tokens_beyond_the_first_capacity() {
    const STEPS: usize = 1100;
    let (folder, target) = (golden("llama-moh-tiny"), tempfile::tempdir().unwrap());
    let path = target.path().join("model.onnx");
    moh_export::export(&folder, &path, &Options { verify: Some(false), ..in_place() }).unwrap();
    let prompt = vec![3, 1, 4, 1, 5];
    let prompts = Prompts::new(std::slice::from_ref(&prompt), 0).unwrap();
    let options = GenerateOptions { max_tokens: STEPS, ..GenerateOptions::default() };
    for (way, runtime) in runtimes() {
        let mut model = LanguageModel::new(Model::load(&path, &runtime).unwrap()).unwrap();
        let generated = model.generate(&prompts, &options, |_| ControlFlow::Continue(())).unwrap();
        let (ids, mask) = (matrix(std::slice::from_ref(&prompt)), matrix(&[vec![1; prompt.len()]]));
        let (expected, _) = greedy_in(model.model_mut(), &ids, &mask, STEPS, prompt.len() + STEPS);
        assert_eq!(generated.tokens[0], expected[0][prompt.len()..], "{way}");
    }
}

/// What the published code generates for padded prompts that are read in parts: one of nothing but padding among them, for some.
#[test]
fn golden_tokens_of_prompts_read_in_parts() {
    let (folder, target) = (golden("llama-moh-tiny"), tempfile::tempdir().unwrap());
    let reference = read_tensors(&folder.join("reference.safetensors"));
    let get = |name: &str| &reference[&format!("padded.{name}")];
    let numbers = |name: &str| get(name).as_slice::<i64>().unwrap().to_vec();
    let (batch, length) = (get("input_ids").shape()[0], get("input_ids").shape()[1]);
    let prompts = Prompts::padded(batch, numbers("input_ids"), numbers("attention_mask")).unwrap();
    let all = numbers("generated_ids");
    let expected: Vec<&[i64]> = all.chunks(all.len() / batch).map(|row| &row[length..]).collect();
    for cache in [Cache::Concat, Cache::InPlace] {
        let path = target.path().join(format!("{cache:?}.onnx"));
        let export = Options { cache: Some(cache), verify: Some(false), ..Options::default() };
        moh_export::export(&folder, &path, &export).unwrap();
        for (way, runtime) in runtimes() {
            let mut model = LanguageModel::new(Model::load(&path, &runtime).unwrap()).unwrap();
            for part in [1, 2 * batch, 5 * batch] {
                let options = GenerateOptions { max_tokens: 12, part: Some(part), ..GenerateOptions::default() };
                let generated = model.generate(&prompts, &options, |_| ControlFlow::Continue(())).unwrap();
                assert_eq!(generated.tokens, expected, "{way}, {cache:?}, parts of {part}");
            }
        }
    }
}

/// The cache that goes into a step comes out of it: the same memory, in every runtime, with and without the library.
#[test]
fn a_step_copies_no_cache() {
    let (folder, target) = (golden("llama-moh-tiny"), tempfile::tempdir().unwrap());
    let path = target.path().join("model.onnx");
    moh_export::export(&folder, &path, &Options { verify: Some(false), ..in_place() }).unwrap();
    for (way, options) in runtimes() {
        let mut model = Model::load(&path, &options).unwrap();
        let caches: Vec<(String, usize, usize)> = model.caches();
        let outputs: Vec<String> = model.outputs().iter().map(|output| output.name.clone()).collect();
        let output =
            |input: &str| outputs.iter().position(|name| *name == input.replacen("past_key_values", "present", 1));
        let shared: Vec<(&str, usize)> = caches.iter().map(|(name, ..)| (&name[..], output(name).unwrap())).collect();
        let mut values: Vec<(String, Value)> = caches
            .iter()
            .map(|(name, heads, dim)| {
                let zeros = Tensor::zeros(moh_runtime::ElementType::F32, vec![1, *heads, 16, *dim]).unwrap();
                (name.clone(), zeros.into())
            })
            .collect();
        let mut before: Option<Vec<*const f32>> = None;
        for step in 0..5 {
            let mut inputs = std::mem::take(&mut values);
            for (name, numbers) in [
                ("input_ids", vec![step + 3]),
                ("attention_mask", vec![1; step as usize + 1]),
                ("position_ids", vec![step]),
            ] {
                inputs.push((name.to_owned(), matrix(&[numbers]).into()));
            }
            let mut outputs: Vec<Option<Value>> =
                model.run_in_place(inputs, &shared).unwrap().into_iter().map(Some).collect();
            values = shared.iter().map(|&(name, i)| (name.to_owned(), outputs[i].take().unwrap())).collect();
            let now: Vec<*const f32> = values.iter().map(|(_, value)| address(value)).collect();
            assert!(before.is_none_or(|before| before == now), "{way}, step {step}: the cache has moved");
            before = Some(now);
        }
        // A caller that keeps the values sees them unchanged.
        let kept = values.clone();
        let held = floats(&kept[0].1.to_tensor().unwrap());
        let mut inputs = values;
        for (name, numbers) in [("input_ids", vec![1]), ("attention_mask", vec![1; 6]), ("position_ids", vec![5])] {
            inputs.push((name.to_owned(), matrix(&[numbers]).into()));
        }
        model.run_in_place(inputs, &shared).unwrap();
        assert_eq!(floats(&kept[0].1.to_tensor().unwrap()), held, "{way}");
    }
}

/// A measured decode costs what one of a generation does: the cache stays where it is, with room for the one token that all runs write.
#[test]
fn measured_decodes_copy_no_cache() {
    let (folder, target) = (golden("llama-moh-tiny"), tempfile::tempdir().unwrap());
    let path = target.path().join("model.onnx");
    moh_export::export(&folder, &path, &Options { verify: Some(false), ..in_place() }).unwrap();
    for (way, options) in runtimes() {
        let mut model = Model::load(&path, &options).unwrap();
        let workload = Workload::new(&model).unwrap();
        let sizes = workload.sizes(&model, 2, Some(7)).unwrap();
        let mut runs = workload.runs(&mut model, Phase::Decode, sizes).unwrap();
        let caches = |runs: &Runs| -> Vec<(*const f32, Vec<usize>)> {
            let caches = runs.inputs().filter(|(name, _)| name.starts_with("past_key_values."));
            caches.map(|(_, value)| (address(value), value.shape().to_vec())).collect()
        };
        let before = caches(&runs);
        assert!(!before.is_empty() && before.iter().all(|(_, shape)| shape[2] == 8), "{way}: {before:?}");
        for _ in 0..3 {
            runs.once(&mut model, None).unwrap();
        }
        assert_eq!(caches(&runs), before, "{way}");
        // A profile's runs too.
        runs.once(&mut model, Some(&mut |_, _, _| ())).unwrap();
        assert_eq!(caches(&runs), before, "{way}");
    }
}

#[test]
fn both_caches_generate_the_same_tokens() {
    let (folder, target) = (golden("llama-moh-tiny"), tempfile::tempdir().unwrap());
    let prompts = Prompts::new(&[vec![3, 1, 4, 1, 5], vec![9, 2], vec![6]], 0).unwrap();
    let options = GenerateOptions { max_tokens: 20, keep_logits: true, ..GenerateOptions::default() };
    for (way, runtime) in runtimes() {
        let mut found = Vec::new();
        for cache in [Cache::Concat, Cache::InPlace] {
            let path = target.path().join(format!("{cache:?}.onnx"));
            let export = Options { cache: Some(cache), verify: Some(false), force: true, ..Options::default() };
            moh_export::export(&folder, &path, &export).unwrap();
            let mut model = LanguageModel::new(Model::load(&path, &runtime).unwrap()).unwrap();
            let generated = model.generate(&prompts, &options, |_| ControlFlow::Continue(())).unwrap();
            found.push((generated.tokens, floats(&generated.logits.unwrap())));
        }
        assert_eq!(found[0].0, found[1].0, "{way}");
        close(way, "logits", &found[1].1, &found[0].1);
    }
}

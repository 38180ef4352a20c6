//! Language models in every runtime that is here.

use crate::models::{count_on, counter};
use crate::support::{doubler, runtimes};
use moh_runtime::{Model, Options, RuntimeChoice};
use moh_tasks::generate::{GenerateOptions, LanguageModel, Prompts, Sampling};
use std::ops::ControlFlow;
use std::path::Path;

fn tract() -> Options {
    Options { runtime: RuntimeChoice::Tract, ..Options::default() }
}

fn language_models(path: &Path) -> Vec<LanguageModel> {
    runtimes().iter().map(|options| LanguageModel::new(Model::load(path, options).unwrap()).unwrap()).collect()
}

fn go_on(_: &[Option<i64>]) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn a_padded_batch_continues_as_each_prompt_alone() {
    let (_folder, path) = counter();
    let prompts = [vec![3, 1, 4, 1, 5], vec![9], vec![2, 6]];
    for mut model in language_models(&path) {
        let batch = Prompts::new(&prompts, 7).unwrap();
        let options = GenerateOptions { max_tokens: 12, ..GenerateOptions::default() };
        let generated = model.generate(&batch, &options, go_on).unwrap();
        for (tokens, prompt) in generated.tokens.iter().zip(&prompts) {
            assert_eq!(*tokens, count_on(prompt, 12), "{}", model.model().runtime_name());
        }
        assert_eq!(generated.decode_steps, 11);
        assert!(generated.logits.is_none());
    }
}

#[test]
fn logits_are_those_that_the_tokens_were_taken_from() {
    let (_folder, path) = counter();
    for mut model in language_models(&path) {
        let options = GenerateOptions { max_tokens: 4, keep_logits: true, ..GenerateOptions::default() };
        let batch = Prompts::new(&[vec![1, 2], vec![5]], 0).unwrap();
        let generated = model.generate(&batch, &options, go_on).unwrap();
        let logits = generated.logits.unwrap();
        assert_eq!(logits.shape(), [2, 4, 11]);
        let rows = logits.as_slice::<f32>().unwrap().chunks(11);
        for (row, token) in rows.zip(generated.tokens.concat()) {
            let expected: Vec<f32> = (0..11).map(|id| -((id - token) * (id - token)) as f32).collect();
            assert_eq!(row, expected);
        }
    }
}

#[test]
fn a_sequence_ends_at_a_stop_token_while_others_go_on() {
    let (_folder, path) = counter();
    let prompts = [vec![3, 1, 4, 1, 5], vec![9]];
    let full = prompts.clone().map(|prompt| count_on(&prompt, 12));
    let stop = full[0][2];
    let until = |tokens: &[i64]| tokens.iter().position(|&token| token == stop).map_or(tokens.len(), |i| i + 1);
    let lengths = full.clone().map(|tokens| until(&tokens));
    assert_ne!(lengths[0], lengths[1], "the sequences end at different steps");
    for mut model in language_models(&path) {
        let mut seen = Vec::new();
        let options = GenerateOptions { max_tokens: 12, stop: &[stop], ..GenerateOptions::default() };
        let batch = Prompts::new(&prompts, 0).unwrap();
        let collect = |step: &[Option<i64>]| {
            seen.push(step.to_vec());
            ControlFlow::Continue(())
        };
        let generated = model.generate(&batch, &options, collect).unwrap();
        for (row, tokens) in generated.tokens.iter().enumerate() {
            assert_eq!(*tokens, full[row][..lengths[row]]);
            let shown: Vec<i64> = seen.iter().filter_map(|step| step[row]).collect();
            assert_eq!(shown, *tokens, "on_step sees the same tokens");
        }
        assert_eq!(seen.len(), lengths[0].max(lengths[1]));
    }
}

#[test]
fn tokens_drawn_at_random_depend_on_the_seed_and_the_place() {
    let (_folder, path) = counter();
    let prompts = Prompts::new(&[vec![1, 2], vec![1, 2]], 0).unwrap();
    for mut model in language_models(&path) {
        let mut draw = |seed, temperature| {
            let sampling = Some(Sampling { temperature, top_k: None, top_p: 1.0, seed });
            let options = GenerateOptions { max_tokens: 30, sampling, ..GenerateOptions::default() };
            model.generate(&prompts, &options, go_on).unwrap().tokens
        };
        let drawn = draw(1, 50.0);
        assert_eq!(drawn, draw(1, 50.0));
        assert_ne!(drawn, draw(2, 50.0));
        assert_ne!(drawn[0], drawn[1]);
        assert_eq!(draw(1, 1e-3), [count_on(&[1, 2], 30), count_on(&[1, 2], 30)]);
        let sampling = Some(Sampling { temperature: -1.0, top_k: None, top_p: 1.0, seed: 0 });
        let options = GenerateOptions { max_tokens: 1, sampling, ..GenerateOptions::default() };
        let error = model.generate(&prompts, &options, go_on).unwrap_err().to_string();
        assert_eq!(error, "temperature: expected a positive number, found -1");
    }
}

#[test]
fn the_caller_may_break_off() {
    let (_folder, path) = counter();
    let mut model = language_models(&path).remove(0);
    let options = GenerateOptions { max_tokens: 100, ..GenerateOptions::default() };
    let mut steps = 0;
    let count = |_: &[Option<i64>]| {
        steps += 1;
        if steps == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let generated = model.generate(&Prompts::new(&[vec![1]], 0).unwrap(), &options, count).unwrap();
    assert_eq!(generated.tokens, [count_on(&[1], 3)]);
}

#[test]
fn another_kind_of_model_is_no_language_model() {
    let (_folder, path) = doubler();
    let error = LanguageModel::new(Model::load(&path, &tract()).unwrap()).unwrap_err();
    assert!(error.to_string().contains("not a language model: expected an input input_ids, found x, mask"), "{error}");
}

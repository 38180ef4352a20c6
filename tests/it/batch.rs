//! Sequences that come and go in one cache: each gets the tokens that it gets alone.

use moh::{checkpoint, export, read_tensors, runtimes};
use moh_export::{Cache, Options};
use moh_runtime::Model;
use moh_tasks::generate::{Batch, Chooser, GenerateOptions, LanguageModel, Prompts, Reading, SequenceId};
use std::collections::BTreeMap;
use std::ops::ControlFlow;

const TOKENS: usize = 48;

/// Windows of held-out text, of unequal lengths.
fn prompts() -> Vec<Vec<i64>> {
    let tensors = read_tensors(&checkpoint("shakespeare-moh-llama").join("heldout.safetensors"));
    let ids = tensors["val_ids"].as_slice::<i64>().unwrap();
    (0..11).map(|i| ids[i * 200..][..[3, 70, 1, 300, 25, 40, 7, 130, 2, 260, 16][i]].to_vec()).collect()
}

fn alone(model: &mut LanguageModel, prompt: &[i64]) -> Vec<i64> {
    let options = GenerateOptions { max_tokens: TOKENS, ..GenerateOptions::default() };
    let prompts = Prompts::new(&[prompt.to_vec()], 0).unwrap();
    model.generate(&prompts, &options, |_| ControlFlow::Continue(())).unwrap().tokens.remove(0)
}

struct Running {
    number: usize,
    tokens: Vec<i64>,
}

/// Sequences in a batch, of which the prompts are read in parts between the steps.
struct Script {
    batch: Batch,
    waiting: Vec<(usize, Vec<i64>)>,
    reading: Option<(usize, Reading)>,
    running: BTreeMap<u64, (SequenceId, Running)>,
    done: BTreeMap<usize, Vec<i64>>,
    joined: u64,
}

impl Script {
    /// Reads the next part of a prompt, if there is a slot for it.
    fn read(&mut self, part: usize) {
        if self.reading.is_none() && self.batch.sequences() < self.batch.slots() {
            let Some((number, prompt)) = self.waiting.pop() else { return };
            self.reading = Some((number, {
                let most = prompt.len() + TOKENS;
                self.batch.read(prompt, most).unwrap()
            }));
        }
        let Some((number, mut reading)) = self.reading.take() else { return };
        let Some(logits) = self.batch.advance(&mut reading, part).unwrap() else {
            self.reading = Some((number, reading));
            return;
        };
        let first = Chooser::new(None, 0).unwrap().choose(&logits.get()).unwrap();
        let id = self.batch.join(reading).unwrap();
        self.running.insert(self.joined, (id, Running { number, tokens: vec![first] }));
        self.joined += 1;
    }

    /// A token of every sequence; each ends after a number of tokens of its own.
    fn step(&mut self) {
        if self.running.is_empty() {
            return;
        }
        let running = &self.running;
        let last = |id| *running.values().find(|(other, _)| *other == id).unwrap().1.tokens.last().unwrap();
        for (id, logits) in self.batch.step(last).unwrap() {
            let key = *self.running.iter().find(|(_, (other, _))| *other == id).unwrap().0;
            let running = &mut self.running.get_mut(&key).unwrap().1;
            running.tokens.push(Chooser::new(None, 0).unwrap().choose(&logits.get()).unwrap());
            if running.tokens.len() >= TOKENS - running.number % 4 * 11 {
                let (id, running) = self.running.remove(&key).unwrap();
                self.batch.leave(id);
                self.done.insert(running.number, running.tokens);
            }
        }
    }
}

#[test]
fn sequences_that_come_and_go_are_each_as_alone() {
    let target = tempfile::tempdir().unwrap();
    let quick = Options { verify: Some(false), ..Options::default() };
    let in_place = Options { cache: Some(Cache::InPlace), ..quick.clone() };
    let folder = checkpoint("shakespeare-moh-llama");
    let in_place = export(&folder, &target.path().join("in-place"), &in_place);
    let concat = export(&folder, &target.path().join("concat"), &quick);
    let prompts = prompts();
    for (way, options) in runtimes() {
        let load = |path| LanguageModel::new(Model::load(path, &options).unwrap()).unwrap();
        let expected: Vec<Vec<i64>> = prompts.iter().map(|prompt| alone(&mut load(&in_place), prompt)).collect();
        // Parts that cut prompts; all slots at once, some, and one.
        for (path, slots, part) in [(&in_place, 16, 64), (&in_place, 3, 1000), (&concat, 4, 64)] {
            let batch = Batch::new(load(path), slots, Some(512));
            assert_eq!(batch.slots(), if path == &concat { 1 } else { slots });
            let waiting = prompts.iter().cloned().enumerate().rev().collect();
            let (running, done) = (BTreeMap::new(), BTreeMap::new());
            let mut script = Script { batch, waiting, reading: None, running, done, joined: 0 };
            while script.done.len() < prompts.len() {
                script.read(part);
                script.step();
            }
            for (number, tokens) in &script.done {
                assert_eq!(*tokens, expected[*number][..tokens.len()], "{way}, {slots} slots: prompt {number}");
            }
            assert_eq!(script.batch.sequences(), 0);
        }
    }
}

#[test]
fn what_a_batch_cannot_take_is_refused_and_harms_nothing() {
    let target = tempfile::tempdir().unwrap();
    let options = Options { cache: Some(Cache::InPlace), verify: Some(false), ..Options::default() };
    let path = export(&checkpoint("shakespeare-moh-llama"), target.path(), &options);
    let (_, tract) = runtimes().pop().unwrap();
    let mut batch = Batch::new(LanguageModel::new(Model::load(&path, &tract).unwrap()).unwrap(), 1, Some(20));
    assert!(batch.read(Vec::new(), 9).unwrap_err().to_string().contains("no tokens"));
    assert!(batch.read(vec![1; 21], 99).unwrap_err().to_string().contains("longest sequence has 20"));
    let mut reading = batch.read(vec![5; 18], 99).unwrap();
    assert!(batch.advance(&mut reading, 10).unwrap().is_none());
    assert_eq!(reading.left(), 8);
    assert!(batch.join(reading).unwrap_err().to_string().contains("8 tokens of the prompt were not read"));
    let whole = |batch: &mut Batch| {
        let mut reading = batch.read(vec![5; 18], 99).unwrap();
        batch.advance(&mut reading, 18).unwrap().unwrap();
        reading
    };
    let reading = whole(&mut batch);
    let first = batch.join(reading).unwrap();
    let reading = whole(&mut batch);
    assert!(batch.join(reading).unwrap_err().to_string().contains("all 1 slots are taken"));
    for _ in 0..2 {
        assert_eq!(batch.step(|_| 5).unwrap()[0].0, first);
    }
    assert!(batch.step(|_| 5).unwrap_err().to_string().contains("the longest has 20"));
    assert_eq!(batch.sequences(), 0);
    let reading = whole(&mut batch);
    assert_ne!(batch.join(reading).unwrap(), first);
}

#![allow(clippy::unwrap_used, clippy::panic)]
use super::super::Finish;
use super::super::Scores;
use super::*;
use crate::deadline::Deadline;
use moh_tasks::generate::{Chooser, StopTexts};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

const VOCABULARY: i64 = 26;

/// The next token is the sum of all before: a sequence that got a token of another one shows it.
#[derive(Default)]
struct Adder {
    sums: BTreeMap<u32, i64>,
    named: u32,
    steps: Vec<usize>,
    parts: Vec<usize>,
    /// Prompts' parts before each step.
    parts_before: Vec<usize>,
    slots: usize,
    /// Whether a step with token 24 fails.
    breaks: bool,
}

struct Part {
    prompt: Vec<i64>,
    read: usize,
    top: Option<usize>,
}

fn logits(sum: i64) -> Logits {
    let one = |token: i64| if token == sum.rem_euclid(VOCABULARY) { 1.0 } else { 0.0 };
    (0..VOCABULARY).map(one).collect::<Vec<f32>>().try_into().unwrap()
}

fn error() -> moh_tasks::Error {
    moh_tasks::Error::Setting("broken".to_owned())
}

impl Run for Adder {
    fn run(&mut self, inputs: Vec<Tensor>, _: &[usize], _: &Interrupt) -> Result<Vec<Tensor>, Problem> {
        Ok(inputs)
    }
}

impl Sequences for Adder {
    type Id = u32;
    type Reading = Part;

    fn slots(&self) -> usize {
        self.slots
    }

    fn bytes_with(&self, prompt: usize, most: usize) -> usize {
        // A byte a token, each sequence of this length.
        (self.sums.len() + 1) * most + prompt
    }

    fn read(&self, prompt: Vec<i64>, _: usize, top: Option<usize>) -> moh_tasks::Result<Part> {
        Ok(Part { prompt, read: 0, top })
    }

    fn scores(&self, part: &mut Part) -> Vec<Score> {
        let (Some(top), mut sum) = (part.top, part.prompt[0]) else { return Vec::new() };
        let score = |&token: &i64| {
            let score = Score::new(&logits(sum).get(), token, top);
            sum += token;
            score.unwrap()
        };
        part.prompt[1..].iter().map(score).collect()
    }

    fn left(&self, part: &Part) -> usize {
        part.prompt.len() - part.read
    }

    fn advance(&mut self, part: &mut Part, tokens: usize) -> moh_tasks::Result<Option<Logits>> {
        assert!(part.prompt != [99], "the model panics");
        let until = part.prompt.len().min(part.read + tokens);
        self.parts.push(until - part.read);
        if part.prompt.contains(&77) {
            return Err(error());
        }
        part.read = until;
        Ok((until == part.prompt.len()).then(|| logits(part.prompt.iter().sum())))
    }

    fn join(&mut self, part: Part) -> moh_tasks::Result<u32> {
        self.named += 1;
        self.sums.insert(self.named, part.prompt.iter().sum());
        Ok(self.named)
    }

    fn step(&mut self, next: &dyn Fn(u32) -> i64) -> moh_tasks::Result<Vec<(u32, Logits)>> {
        self.steps.push(self.sums.len());
        self.parts_before.push(self.parts.len());
        if self.breaks && self.sums.keys().any(|&id| next(id) == 24) {
            self.sums.clear();
            return Err(error());
        }
        Ok(self
            .sums
            .iter_mut()
            .map(|(&id, sum)| {
                *sum += next(id);
                (id, logits(*sum))
            })
            .collect())
    }

    fn leave(&mut self, id: u32) {
        self.sums.remove(&id);
    }

    fn sequences(&self) -> usize {
        self.sums.len()
    }
}

/// A letter a token.
fn tokenizer() -> Tokenizer {
    let vocab: Vec<String> = (0..VOCABULARY).map(|i| format!("\"{}\": {i}", char::from(b'a' + i as u8))).collect();
    let json = format!(
        r#"{{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "truncation": null, "padding": null,
        "decoder": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}},
        "model": {{"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": {{{}}}, "merges": []}}}}"#,
        vocab.join(",")
    );
    Tokenizer::from_bytes(json).unwrap()
}

fn prompt(tokens: &[i64], max_tokens: usize) -> (Prompt, UnboundedReceiver<Event>) {
    let (events, received) = unbounded_channel();
    let prompt = Prompt {
        tokens: tokens.to_vec(),
        max_tokens,
        scores: None,
        chooser: Chooser::new(None, 0).unwrap(),
        stop: StopTexts::default(),
        ignore_end: false,
        deadline: Deadline::after(Duration::from_secs(60)),
        begun: Arc::default(),
        events,
    };
    (prompt, received)
}

/// What a sequence should be.
fn expected(tokens: &[i64], count: usize) -> String {
    let mut sum: i64 = tokens.iter().sum();
    let mut text = String::new();
    for _ in 0..count {
        let next = sum.rem_euclid(VOCABULARY);
        text.push(char::from(b'a' + next as u8));
        sum += next;
    }
    text
}

fn outcome(events: &mut UnboundedReceiver<Event>) -> (String, Option<Event>) {
    let mut text = String::new();
    while let Ok(event) = events.try_recv() {
        match event {
            Event::Piece { text: piece, scores } => {
                assert!(!piece.is_empty() && scores.is_empty());
                text += &piece;
            }
            end => return (text, Some(end)),
        }
    }
    (text, None)
}

/// Serves these prompts, all there from the beginning.
fn serve(model: &mut Adder, prompts: Vec<Prompt>, health: &Health, end: &[i64]) {
    serve_in(usize::MAX, model, prompts, health, end);
}

/// As [`serve`], with so much memory.
fn serve_in(memory: usize, model: &mut Adder, prompts: Vec<Prompt>, health: &Health, end: &[i64]) {
    let (queue, tokenizer) = (Queue::new(99), tokenizer());
    prompts.into_iter().for_each(|prompt| queue.push(Job::Text(Box::new(prompt))).unwrap());
    queue.close();
    let engine =
        Engine { name: "m", instance: 0, queue: &queue, tokenizer: &tokenizer, end, prefill: 3, memory, health };
    engine.serve(model);
    assert_eq!(model.sequences(), 0, "slots were not given back");
}

fn end(finish: Finish, tokens: usize) -> Option<Event> {
    Some(Event::End { finish, tokens })
}

#[test]
fn sequences_come_and_go_and_each_gets_its_own_text() {
    let mut model = Adder { slots: 3, ..Adder::default() };
    let all: Vec<(Vec<i64>, usize)> =
        (0..9).map(|i| ((1..=i % 4 + 1).map(|x| x * (i + 1)).collect(), i as usize * 2 + 1)).collect();
    let (prompts, mut events): (Vec<_>, Vec<_>) = all.iter().map(|(tokens, count)| prompt(tokens, *count)).unzip();
    serve(&mut model, prompts, &Health::default(), &[]);
    for ((tokens, count), events) in all.iter().zip(&mut events) {
        assert_eq!(outcome(events), (expected(tokens, *count), end(Finish::Length, *count)));
    }
    assert_eq!(model.steps.iter().max(), Some(&3), "{:?}", model.steps);
    assert!(model.parts.iter().all(|&part| part <= 3) && model.parts.contains(&1));
}

#[test]
fn texts_wait_until_there_is_memory_for_them_in_their_order() {
    let mut model = Adder { slots: 9, ..Adder::default() };
    let (prompts, mut events): (Vec<_>, Vec<_>) = (0..6).map(|i| prompt(&[i], 9)).unzip();
    // Two of ten tokens and a prompt, not three.
    serve_in(25, &mut model, prompts, &Health::default(), &[]);
    for (i, events) in (0..6).zip(&mut events) {
        assert_eq!(outcome(events), (expected(&[i], 9), end(Finish::Length, 9)));
    }
    assert_eq!(model.steps.iter().max(), Some(&2), "{:?}", model.steps);
    // One that has been given up makes way, and one that needs more than there is runs alone.
    let mut model = Adder { slots: 9, ..Adder::default() };
    let ((a, mut at), (b, gone), (c, mut ct)) = (prompt(&[1], 9), prompt(&[2], 50), prompt(&[3], 5));
    drop(gone);
    serve_in(21, &mut model, vec![a, b, c], &Health::default(), &[]);
    assert_eq!(outcome(&mut at).1, end(Finish::Length, 9));
    assert_eq!(outcome(&mut ct), (expected(&[3], 5), end(Finish::Length, 5)));
}

#[test]
fn short_prompts_are_read_together_between_two_steps() {
    let mut model = Adder { slots: 9, ..Adder::default() };
    let (prompts, _events): (Vec<_>, Vec<_>) = [1, 2, 2, 1, 1].iter().map(|&n| prompt(&vec![1; n], 4)).unzip();
    serve(&mut model, prompts, &Health::default(), &[]);
    // Three tokens at a time: 1 + 2, 2 + 1, 1.
    assert_eq!(model.steps[..3], [2, 4, 5], "{:?}", model.steps);
    assert_eq!(model.parts, [1, 2, 2, 1, 1]);
}

/// Neither texts of one token nor prompts that fail take a slot.
#[test]
fn prompts_that_take_no_slot_do_not_hold_the_others_up() {
    let mut model = Adder { slots: 2, ..Adder::default() };
    let (long, mut received) = prompt(&[2], 20);
    let others = (0..20).map(|i| prompt(&[if i % 2 == 0 { 77 } else { 3 }], 1));
    let (prompts, _events): (Vec<_>, Vec<_>) = std::iter::once((long, unbounded_channel().1)).chain(others).unzip();
    serve(&mut model, prompts, &Health::default(), &[]);
    assert_eq!(outcome(&mut received), (expected(&[2], 20), end(Finish::Length, 20)));
    assert_eq!(model.parts.len(), 21);
    assert!(model.parts_before.windows(2).all(|pair| pair[1] - pair[0] <= 3), "{:?}", model.parts_before);
}

/// What ends a prompt in a character of several tokens is no part of the text.
#[test]
fn a_text_begins_after_the_prompts_last_character() {
    // The bytes of 😀 are four tokens, and their sum is that of a line feed.
    let named = [("<0x0A>", 4), ("<0xF0>", 6), ("<0x9F>", 7), ("<0x98>", 8), ("<0x80>", 9)];
    let name =
        |id: i64| named.iter().find(|(_, of)| *of == id).map_or(format!("t{id}"), |(name, _)| (*name).to_owned());
    let vocab: Vec<String> = (0..VOCABULARY).map(|id| format!("\"{}\": {id}", name(id))).collect();
    let json = format!(
        r#"{{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "truncation": null, "padding": null,
        "decoder": {{"type": "Sequence", "decoders": [{{"type": "ByteFallback"}}, {{"type": "Fuse"}}]}},
        "model": {{"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "vocab": {{{}}}, "merges": []}}}}"#,
        vocab.join(",")
    );
    let (queue, tokenizer, health) = (Queue::new(9), Tokenizer::from_bytes(json).unwrap(), Health::default());
    let (emoji, mut events) = prompt(&[6, 7, 8, 9], 1);
    queue.push(Job::Text(Box::new(emoji))).unwrap();
    queue.close();
    let (memory, health) = (usize::MAX, &health);
    let engine =
        Engine { name: "m", instance: 0, queue: &queue, tokenizer: &tokenizer, end: &[], prefill: 3, memory, health };
    engine.serve(&mut Adder { slots: 1, ..Adder::default() });
    assert_eq!(outcome(&mut events), ("\n".to_owned(), end(Finish::Length, 1)));
}

#[test]
fn texts_end_at_stop_texts_and_tokens() {
    let mut model = Adder { slots: 2, ..Adder::default() };
    let ((mut a, mut at), (b, mut bt)) = (prompt(&[1], 20), prompt(&[1], 20));
    // b, c, e, i, q, g, m, y ..
    a.stop = StopTexts::new(vec!["iq".to_owned()]);
    serve(&mut model, vec![a, b], &Health::default(), &[6]);
    assert_eq!(outcome(&mut at), ("bce".to_owned(), end(Finish::Stop, 5)));
    assert_eq!(outcome(&mut bt), ("bceiq".to_owned(), end(Finish::Stop, 6)));
}

/// Of each token that the text has or ends with, with the piece that shows it, and of the prompt's, if they are asked for.
#[test]
fn tokens_are_scored_for_those_who_ask() {
    let all = |events: &mut UnboundedReceiver<Event>| std::iter::from_fn(|| events.try_recv().ok()).collect::<Vec<_>>();
    let ask = |tokens: &[i64], max_tokens, of_prompt| {
        let (mut prompt, events) = prompt(tokens, max_tokens);
        prompt.scores = Some(Scores { top: 1, of_prompt });
        (prompt, events)
    };
    // One logit of 26 is 1, the others are 0.
    let (likely, other) = (1.0 - (1f32.exp() + 25.0).ln(), -(1f32.exp() + 25.0).ln());
    let is = |score: &Score, token: i64, logprob: f32, top: i64| {
        let near = |a: f32, b: f32| (a - b).abs() < 1e-5;
        let [(first, highest)] = score.top[..] else { return false };
        score.token == token && near(score.logprob, logprob) && first == top && near(highest, likely)
    };
    let mut model = Adder { slots: 2, ..Adder::default() };
    // 1: b, c, e, i, q, then 6, which ends it.
    let ((mut a, mut at), (b, mut bt)) = (ask(&[1], 20, false), ask(&[1, 1, 9], 0, true));
    a.stop = StopTexts::new(vec!["eix".to_owned()]);
    serve(&mut model, vec![a, b], &Health::default(), &[6]);
    let (mut text, mut tokens) = (String::new(), Vec::new());
    let events = all(&mut at);
    for event in &events[..events.len() - 1] {
        let Event::Piece { text: piece, scores } = event else { panic!("{event:?}") };
        text += piece;
        assert!(scores.iter().all(|score| is(score, score.token, likely, score.token)), "{scores:?}");
        tokens.extend(scores.iter().map(|score| score.token));
    }
    assert_eq!((text.as_str(), tokens), ("bceiq", vec![1, 2, 4, 8, 16, 6]));
    assert_eq!(events.last(), end(Finish::Stop, 6).as_ref());
    // The prompt alone: the second token is likely, the third is not.
    let [Event::Piece { text, scores }, Event::End { finish: Finish::Length, tokens: 0 }] = &all(&mut bt)[..] else {
        panic!("another end")
    };
    assert!(text.is_empty() && scores.len() == 2, "{scores:?}");
    assert!(is(&scores[0], 1, likely, 1) && is(&scores[1], 9, other, 2), "{scores:?}");
}

#[test]
fn a_client_that_is_gone_frees_its_slot_at_once() {
    let mut model = Adder { slots: 1, ..Adder::default() };
    let ((a, gone), (b, mut bt)) = (prompt(&[2], 1_000_000), prompt(&[2], 2));
    drop(gone);
    serve(&mut model, vec![a, b], &Health::default(), &[]);
    assert_eq!(outcome(&mut bt), ("ce".to_owned(), end(Finish::Length, 2)));
    assert_eq!(model.steps.len(), 1);
}

#[test]
fn deadlines_are_kept_while_a_text_runs() {
    let mut model = Adder { slots: 1, ..Adder::default() };
    // 0, 0, 0, ...: it never ends by itself.
    let (mut a, mut at) = prompt(&[26], usize::MAX);
    a.deadline = Deadline::after(Duration::from_millis(30));
    // It says that its turn came before it has anything to show.
    let begun = a.begun.clone();
    assert!(!begun.load(Ordering::Relaxed));
    serve(&mut model, vec![a], &Health::default(), &[]);
    let (text, failed) = outcome(&mut at);
    assert!(begun.load(Ordering::Relaxed) && text.starts_with("aaaa"), "{}", text.len());
    assert!(matches!(failed, Some(Event::Failed(problem)) if problem.kind == crate::problem::Kind::Deadline));
}

#[test]
fn a_prompt_that_fails_harms_no_other() {
    let mut model = Adder { slots: 4, ..Adder::default() };
    let ((a, mut at), (b, mut bt), (c, mut ct)) = (prompt(&[2], 3), prompt(&[1, 77], 3), prompt(&[3], 2));
    serve(&mut model, vec![a, b, c], &Health::default(), &[]);
    assert_eq!(outcome(&mut at), ("cei".to_owned(), end(Finish::Length, 3)));
    assert!(matches!(outcome(&mut bt), (text, Some(Event::Failed(_))) if text.is_empty()));
    assert_eq!(outcome(&mut ct), ("dg".to_owned(), end(Finish::Length, 2)));
}

#[test]
fn a_step_that_fails_is_told_to_all_of_it_and_the_next_are_served() {
    let mut model = Adder { slots: 2, breaks: true, ..Adder::default() };
    let ((a, mut at), (b, mut bt), (c, mut ct)) = (prompt(&[26], 9), prompt(&[24], 9), prompt(&[3], 2));
    serve(&mut model, vec![a, b, c], &Health::default(), &[]);
    assert!(matches!(outcome(&mut at).1, Some(Event::Failed(_))));
    assert!(matches!(outcome(&mut bt).1, Some(Event::Failed(_))));
    assert_eq!(outcome(&mut ct), ("dg".to_owned(), end(Finish::Length, 2)));
}

#[test]
fn a_panic_ends_every_request_and_hangs_none() {
    let (queue, tokenizer, health) = (Arc::new(Queue::new(9)), tokenizer(), Health::default());
    let ((a, mut at), (b, mut bt)) = (prompt(&[26], 9), prompt(&[99], 9));
    [a, b].into_iter().for_each(|prompt| queue.push(Job::Text(Box::new(prompt))).unwrap());
    queue.close();
    let (memory, health) = (usize::MAX, &health);
    let engine =
        Engine { name: "m", instance: 0, queue: &queue, tokenizer: &tokenizer, end: &[], prefill: 3, memory, health };
    let mut model = Adder { slots: 2, ..Adder::default() };
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| engine.serve(&mut model)));
    assert!(panicked.is_err());
    for events in [&mut at, &mut bt] {
        assert_eq!(outcome(events).1, None);
        assert!(events.is_closed() && events.try_recv().is_err());
    }
}

#[test]
fn a_shutdown_that_takes_too_long_ends_what_runs() {
    let mut model = Adder { slots: 1, ..Adder::default() };
    let ((a, mut at), (b, mut bt)) = (prompt(&[26], usize::MAX), prompt(&[26], usize::MAX));
    let health = Health::default();
    health.abort();
    serve(&mut model, vec![a, b], &health, &[]);
    for events in [&mut at, &mut bt] {
        assert_eq!(outcome(events).1, Some(Event::Failed(Problem::closing())));
    }
}

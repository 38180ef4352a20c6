//! The thread that generates: it takes prompts in, reads them part by part, and steps all sequences at once.

use super::sequence::Sequence;
use super::{Event, Job, Prompt};
use crate::measure;
use crate::problem::Problem;
use crate::queue::Queue;
use crate::tensors::{self, Run};
use crate::worker::Health;
use moh_runtime::{Interrupt, Tensor};
use moh_tasks::generate::{Batch, Logits, Reading, Score, SequenceId};
use moh_tasks::text::Tokenizer;
use std::sync::atomic::Ordering;

/// What a model of texts does, as [`Batch`] says.
pub(crate) trait Sequences: Run {
    type Id: Copy + Eq;
    type Reading;
    fn slots(&self) -> usize;
    fn bytes_with(&self, prompt: usize, most: usize) -> usize;
    /// `top`: as of [`Reading::scored`], if the prompt is scored.
    fn read(&self, prompt: Vec<i64>, most: usize, top: Option<usize>) -> moh_tasks::Result<Self::Reading>;
    fn scores(&self, reading: &mut Self::Reading) -> Vec<Score>;
    fn left(&self, reading: &Self::Reading) -> usize;
    fn advance(&mut self, reading: &mut Self::Reading, tokens: usize) -> moh_tasks::Result<Option<Logits>>;
    fn join(&mut self, reading: Self::Reading) -> moh_tasks::Result<Self::Id>;
    fn step(&mut self, next: &dyn Fn(Self::Id) -> i64) -> moh_tasks::Result<Vec<(Self::Id, Logits)>>;
    fn leave(&mut self, id: Self::Id);
    fn sequences(&self) -> usize;
}

impl Run for Batch {
    fn run(&mut self, inputs: Vec<Tensor>, outputs: &[usize], interrupt: &Interrupt) -> Result<Vec<Tensor>, Problem> {
        Run::run(self.model_mut().model_mut(), inputs, outputs, interrupt)
    }
}

impl Sequences for Batch {
    type Id = SequenceId;
    type Reading = Reading;

    fn slots(&self) -> usize {
        Batch::slots(self)
    }

    fn bytes_with(&self, prompt: usize, most: usize) -> usize {
        Batch::bytes_with(self, prompt, most)
    }

    fn read(&self, prompt: Vec<i64>, most: usize, top: Option<usize>) -> moh_tasks::Result<Reading> {
        let reading = Batch::read(self, prompt, most)?;
        Ok(match top {
            Some(top) => reading.scored(top),
            None => reading,
        })
    }

    fn scores(&self, reading: &mut Reading) -> Vec<Score> {
        reading.scores()
    }

    fn left(&self, reading: &Reading) -> usize {
        reading.left()
    }

    fn advance(&mut self, reading: &mut Reading, tokens: usize) -> moh_tasks::Result<Option<Logits>> {
        Batch::advance(self, reading, tokens)
    }

    fn join(&mut self, reading: Reading) -> moh_tasks::Result<SequenceId> {
        Batch::join(self, reading)
    }

    fn step(&mut self, next: &dyn Fn(SequenceId) -> i64) -> moh_tasks::Result<Vec<(SequenceId, Logits)>> {
        Batch::step(self, next)
    }

    fn leave(&mut self, id: SequenceId) {
        Batch::leave(self, id);
    }

    fn sequences(&self) -> usize {
        Batch::sequences(self)
    }
}

/// Prompts that are read between two steps, at most.
const MOST_RUNS: usize = 8;

/// What an engine needs to know.
pub(crate) struct Engine<'a> {
    /// The model's name, for measurements.
    pub(crate) name: &'a str,
    pub(crate) instance: usize,
    pub(crate) queue: &'a Queue<Job>,
    pub(crate) tokenizer: &'a Tokenizer,
    /// Tokens that end a text.
    pub(crate) end: &'a [i64],
    /// Tokens of prompts that are read between two steps.
    pub(crate) prefill: usize,
    /// Bytes that the cache may take.
    pub(crate) memory: usize,
    pub(crate) health: &'a Health,
}

/// What an engine has in hand.
struct Hand<'t, M: Sequences> {
    joining: Option<(Box<Prompt>, M::Reading)>,
    running: Vec<(M::Id, Sequence<&'t Tokenizer>)>,
}

impl<'a> Engine<'a> {
    /// Serves requests until the queue is closed and empty.
    ///
    /// Where this panics, clients notice that their events end without an end.
    pub(crate) fn serve<M: Sequences>(&self, model: &mut M) {
        let mut hand: Hand<'a, M> = Hand { joining: None, running: Vec::new() };
        loop {
            if !self.take_in(model, &mut hand) {
                return;
            }
            self.give_up(model, &mut hand);
            self.step(model, &mut hand);
            measure::slots(self.name, self.instance, hand.running.len());
        }
    }

    /// Reads prompts, as many tokens as may be read between two steps; `false`: the queue is closed, and all is done.
    fn take_in<M: Sequences>(&self, model: &mut M, hand: &mut Hand<'a, M>) -> bool {
        let mut left = self.prefill;
        while left > 0 {
            if hand.joining.is_none() {
                if hand.running.len() >= model.slots() {
                    break;
                }
                // Of one that is alone, the cache fits: longer texts are refused before.
                let is_idle = hand.running.is_empty();
                let job = if is_idle { self.queue.pop() } else { self.queue.pop_if(|job| self.has_room(model, job)) };
                match job {
                    Some(job) => self.begin(model, hand, job),
                    None if is_idle => return false,
                    None => {}
                }
                if hand.joining.is_none() {
                    break;
                }
            }
            let read = self.read_on(model, hand, left);
            // A run takes its time also for one token, and the others wait.
            left = left.saturating_sub(read.max(self.prefill.div_ceil(MOST_RUNS)));
        }
        true
    }

    /// Whether the cache may become as large as this makes it.
    fn has_room<M: Sequences>(&self, model: &M, job: &Job) -> bool {
        match job {
            Job::Text(prompt) => model.bytes_with(prompt.tokens.len(), prompt.most()) <= self.memory,
            Job::Tensors(_) => true,
        }
    }

    fn begin<M: Sequences>(&self, model: &mut M, hand: &mut Hand<'a, M>, job: Job) {
        match job {
            Job::Tensors(job) => tensors::alone(model, job),
            Job::Text(mut prompt) => {
                prompt.begun.store(true, Ordering::Relaxed);
                measure::prompt_tokens(self.name, prompt.tokens.len());
                let top = prompt.scores.filter(|scores| scores.of_prompt).map(|scores| scores.top);
                match model.read(prompt.tokens.clone(), prompt.most(), top) {
                    Ok(reading) => hand.joining = Some((prompt, reading)),
                    Err(error) => {
                        prompt.tokens.clear();
                        let _ = prompt.events.send(Event::Failed(problem(&error)));
                    }
                }
            }
        }
    }

    /// Reads at most so many tokens of the prompt that joins next; gives their number.
    fn read_on<M: Sequences>(&self, model: &mut M, hand: &mut Hand<'a, M>, most: usize) -> usize {
        let Some((prompt, mut reading)) = hand.joining.take() else { return 0 };
        if prompt.events.is_closed() {
            return 0;
        }
        if prompt.deadline.has_passed() || self.health.is_aborted() {
            let aborted = self.health.is_aborted();
            let problem = if aborted { Problem::closing() } else { prompt.deadline.ran() };
            let _ = prompt.events.send(Event::Failed(problem));
            return 0;
        }
        // With nobody to wait for it, there is no reason to read it in parts but memory, which that bounds, too.
        let left = model.left(&reading);
        let advanced = model.advance(&mut reading, most);
        let read = left - model.left(&reading).min(left);
        match advanced {
            Ok(None) => hand.joining = Some((prompt, reading)),
            Ok(Some(logits)) => self.join(model, hand, *prompt, reading, &logits),
            Err(error) => drop(prompt.events.send(Event::Failed(problem(&error)))),
        }
        read
    }

    /// Takes in a sequence whose prompt was read, and its first token.
    fn join<M: Sequences>(
        &self,
        model: &mut M,
        hand: &mut Hand<'a, M>,
        prompt: Prompt,
        mut reading: M::Reading,
        logits: &Logits,
    ) {
        let (events, began, generates) = (prompt.events.clone(), prompt.deadline.began, prompt.max_tokens > 0);
        let Some(mut sequence) = Sequence::new(prompt, model.scores(&mut reading), self.tokenizer) else {
            return drop(events.send(Event::Failed(Problem::failed("the tokenizer cannot decode the prompt"))));
        };
        if generates {
            measure::first_token(self.name, began.elapsed());
            measure::generated_tokens(self.name, 1);
        }
        if !sequence.take(&logits.get(), self.end) {
            return;
        }
        match model.join(reading) {
            Ok(id) => hand.running.push((id, sequence)),
            Err(error) => {
                sequence.fail(problem(&error));
                self.lost(model, hand, &error);
            }
        }
    }

    /// Takes sequences out that nobody waits for.
    fn give_up<M: Sequences>(&self, model: &mut M, hand: &mut Hand<'a, M>) {
        let aborted = self.health.is_aborted();
        hand.running.retain(|(id, sequence)| {
            let given_up = sequence.is_given_up(aborted);
            if given_up {
                model.leave(*id);
            }
            !given_up
        });
    }

    /// A token for every sequence.
    fn step<M: Sequences>(&self, model: &mut M, hand: &mut Hand<'a, M>) {
        if hand.running.is_empty() {
            return;
        }
        let running = &hand.running;
        let last =
            |id: M::Id| running.iter().find(|(other, _)| *other == id).map_or(0, |(_, sequence)| sequence.last());
        let logits = match model.step(&last) {
            Ok(logits) => logits,
            Err(error) => return self.lost(model, hand, &error),
        };
        measure::batch(self.name, logits.len());
        measure::generated_tokens(self.name, logits.len());
        for (id, logits) in logits {
            let Some(at) = hand.running.iter().position(|(other, _)| *other == id) else { continue };
            if !hand.running[at].1.take(&logits.get(), self.end) {
                hand.running.swap_remove(at);
                model.leave(id);
            }
        }
    }

    /// After an error of the model it has no sequences any more.
    fn lost<M: Sequences>(&self, model: &mut M, hand: &mut Hand<'a, M>, error: &moh_tasks::Error) {
        if model.sequences() == 0 {
            hand.running.drain(..).for_each(|(_, sequence)| sequence.fail(problem(error)));
        }
    }
}

fn problem(error: &moh_tasks::Error) -> Problem {
    match error {
        moh_tasks::Error::Prompt(reason) => Problem::invalid(format!("prompt: {reason}")),
        error => Problem::of_runtime(error),
    }
}

#[cfg(test)]
mod tests;

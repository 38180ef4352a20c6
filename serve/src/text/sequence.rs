//! A sequence that is generated: its tokens become text, and it comes to an end.

use super::{Event, Finish, Prompt};
use crate::problem::Problem;
use moh_tasks::generate::{Score, TextStream};
use moh_tasks::text::Tokenizer;
use std::borrow::Borrow;

/// A sequence on its way.
pub(super) struct Sequence<T> {
    prompt: Prompt,
    text: TextStream<T>,
    last: i64,
    tokens: usize,
    /// Those that nobody was told of.
    scores: Vec<Score>,
}

impl<T: Borrow<Tokenizer>> Sequence<T> {
    /// A sequence that continues the prompt, whose tokens have these scores if they were asked for; `None` where the tokenizer cannot decode it.
    pub(super) fn new(prompt: Prompt, scores: Vec<Score>, tokenizer: T) -> Option<Sequence<T>> {
        let last = prompt.tokens.last().copied().unwrap_or_default();
        let context: Vec<u32> = prompt.tokens.iter().filter_map(|&token| u32::try_from(token).ok()).collect();
        let text = TextStream::new(tokenizer, &context).ok()?;
        Some(Sequence { text, last, tokens: 0, scores, prompt })
    }

    /// The token that comes next into the model.
    pub(super) fn last(&self) -> i64 {
        self.last
    }

    /// Whether its client is gone, or its time is over; the client is told.
    pub(super) fn is_given_up(&self, aborted: bool) -> bool {
        let problem = match () {
            () if aborted => Problem::closing(),
            () if self.prompt.deadline.has_passed() => self.prompt.deadline.ran(),
            () => return self.prompt.events.is_closed(),
        };
        self.tell(Event::Failed(problem));
        true
    }

    /// Tells the client that the model failed.
    pub(super) fn fail(&self, problem: Problem) {
        self.tell(Event::Failed(problem));
    }

    /// Takes the token that follows from `logits`; `false` where it was the last one, or none was wanted.
    pub(super) fn take(&mut self, logits: &[f32], end: &[i64]) -> bool {
        if self.prompt.max_tokens == 0 {
            return self.finish(Finish::Length);
        }
        let Some(token) = self.prompt.chooser.choose(logits) else {
            self.fail(Problem::failed("the model gives no probabilities: no logit is a number"));
            return false;
        };
        (self.last, self.tokens) = (token, self.tokens + 1);
        if let Some(asked) = self.prompt.scores {
            let Some(score) = Score::new(logits, token, asked.top) else {
                self.fail(Problem::failed("the model gives no probabilities: a logit is not finite"));
                return false;
            };
            self.scores.push(score);
        }
        if !self.prompt.ignore_end && end.contains(&token) {
            return self.finish(Finish::Stop);
        }
        let piece = u32::try_from(token).ok().and_then(|token| self.text.push(token).ok());
        let Some(piece) = piece else {
            self.fail(Problem::failed(format!("the tokenizer does not know token {token}")));
            return false;
        };
        self.show(&piece);
        if self.prompt.stop.reached() {
            return self.end(Finish::Stop);
        }
        if self.tokens >= self.prompt.max_tokens {
            return self.finish(Finish::Length);
        }
        true
    }

    /// Gives out what was held back.
    fn finish(&mut self, finish: Finish) -> bool {
        let rest = self.text.rest().unwrap_or_default();
        self.show(&rest);
        if self.prompt.stop.reached() {
            return self.end(Finish::Stop);
        }
        let held = self.prompt.stop.finish();
        self.give(held);
        self.end(finish)
    }

    fn show(&mut self, piece: &str) {
        let shown = self.prompt.stop.push(piece);
        self.give(shown);
    }

    fn give(&mut self, text: String) {
        let scores = std::mem::take(&mut self.scores);
        if !text.is_empty() || !scores.is_empty() {
            self.tell(Event::Piece { text, scores });
        }
    }

    fn end(&mut self, finish: Finish) -> bool {
        self.give(String::new());
        self.tell(Event::End { finish, tokens: self.tokens });
        false
    }

    fn tell(&self, event: Event) {
        // A client that is gone is noticed before the next step.
        let _ = self.prompt.events.send(event);
    }
}

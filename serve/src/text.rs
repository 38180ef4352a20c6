//! Texts: prompts in, tokens out as they come, many sequences at a time.

mod engine;
mod sequence;

pub(crate) use engine::Engine;

use crate::deadline::Deadline;
use crate::problem::Problem;
use crate::queue::Abandoned;
use crate::tensors;
use moh_tasks::generate::{Chooser, Score, StopTexts};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tokio::sync::mpsc::UnboundedSender;

/// A request for a text.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<i64>,
    /// 0: nothing is generated, and the prompt is scored alone.
    pub(crate) max_tokens: usize,
    /// How probable tokens are, if somebody asks.
    pub(crate) scores: Option<Scores>,
    pub(crate) chooser: Chooser,
    pub(crate) stop: StopTexts,
    /// Whether to go on after a token that ends texts.
    pub(crate) ignore_end: bool,
    pub(crate) deadline: Deadline,
    /// Whether its turn came.
    pub(crate) begun: Arc<AtomicBool>,
    /// Where the text goes. What it holds is bounded by `max_tokens`: an engine waits for no reader.
    pub(crate) events: UnboundedSender<Event>,
}

/// Which tokens are scored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scores {
    /// Most probable tokens of each place that come with its own.
    pub(crate) top: usize,
    /// Whether those of the prompt are scored, too.
    pub(crate) of_prompt: bool,
}

impl Prompt {
    /// Tokens of the text with its prompt, at most.
    fn most(&self) -> usize {
        self.tokens.len().saturating_add(self.max_tokens)
    }
}

impl Abandoned for Prompt {
    fn is_abandoned(&self) -> bool {
        // One that is overdue is told so by its handler.
        self.events.is_closed() || self.deadline.has_passed()
    }
}

/// What becomes of a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Event {
    /// A piece of the text, and the scores of the tokens since the last one; one of both is not empty.
    Piece { text: String, scores: Vec<Score> },
    /// The end, with the number of generated tokens.
    End { finish: Finish, tokens: usize },
    /// The end of one that failed.
    Failed(Problem),
}

/// Why a text ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finish {
    /// At a token or a text that ends it.
    Stop,
    /// At the most tokens.
    Length,
}

impl Finish {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
        }
    }
}

/// What an engine is asked for.
#[derive(Debug)]
pub(crate) enum Job {
    Text(Box<Prompt>),
    Tensors(tensors::Job),
}

impl Abandoned for Job {
    fn is_abandoned(&self) -> bool {
        match self {
            Job::Text(prompt) => prompt.is_abandoned(),
            Job::Tensors(job) => job.is_abandoned(),
        }
    }
}

//! The models that are served, each with a queue and threads.

mod chat;
mod load;

pub(crate) use chat::{ChatTemplate, Message};
pub(crate) use load::Loader;

use crate::problem::{Kind, Problem};
use crate::queue::{Abandoned, Queue, Refused};
use crate::tensors::{self, Bounds};
use crate::text;
use crate::worker::Health;
use moh_runtime::TensorInfo;
use moh_tasks::generate::GenerationConfig;
use moh_tasks::text::Tokenizer;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// A model that is served.
pub(crate) struct Served {
    pub(crate) name: String,
    pub(crate) inputs: Vec<TensorInfo>,
    pub(crate) outputs: Vec<TensorInfo>,
    /// `onnxruntime_onnxv1` or `tract_onnx`.
    pub(crate) platform: &'static str,
    /// Unix seconds of the loading.
    pub(crate) loaded: u64,
    pub(crate) bounds: Bounds,
    pub(crate) health: Arc<Health>,
    pub(crate) work: Work,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What a model does.
pub(crate) enum Work {
    /// Runs on tensors.
    Tensors(Arc<Queue<tensors::Job>>),
    /// Texts, and runs on tensors between them.
    Text(Box<TextModel>),
}

/// What is known of a language model.
pub(crate) struct TextModel {
    pub(crate) queue: Arc<Queue<text::Job>>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) config: GenerationConfig,
    pub(crate) vocabulary: Option<usize>,
    /// Tokens of a chat with its answer, where nothing is said of its length: as many chats as there are slots fit into the memory.
    pub(crate) usual: Option<usize>,
    pub(crate) chat: Option<ChatTemplate>,
}

impl Served {
    /// Gives a run on tensors to the model's threads.
    pub(crate) fn run(&self, job: tensors::Job) -> Result<(), Problem> {
        match &self.work {
            Work::Tensors(queue) => self.push(queue, vec![job]),
            Work::Text(model) => self.push(&model.queue, vec![text::Job::Tensors(job)]),
        }
    }

    /// Gives texts to the model's threads, all or none of them.
    pub(crate) fn generate(&self, model: &TextModel, prompts: Vec<text::Prompt>) -> Result<(), Problem> {
        let jobs = prompts.into_iter().map(|prompt| text::Job::Text(Box::new(prompt))).collect();
        self.push(&model.queue, jobs)
    }

    fn push<T: Abandoned>(&self, queue: &Queue<T>, jobs: Vec<T>) -> Result<(), Problem> {
        queue.push_all(jobs).map_err(|refused| match refused {
            Refused::Closed => Problem::closing(),
            Refused::Full => {
                Problem::new(Kind::Busy, format!("{} requests wait for {} already", queue.len(), self.name))
            }
        })
    }

    /// Number of requests that wait.
    pub(crate) fn waiting(&self) -> usize {
        match &self.work {
            Work::Tensors(queue) => queue.len(),
            Work::Text(model) => model.queue.len(),
        }
    }

    /// Takes no more requests.
    pub(crate) fn close(&self) {
        self.health.close();
        match &self.work {
            Work::Tensors(queue) => queue.close(),
            Work::Text(model) => model.queue.close(),
        }
    }

    /// Gives up what waits and what runs.
    pub(crate) fn abort(&self) {
        self.health.abort();
        match &self.work {
            Work::Tensors(queue) => queue.clear(),
            Work::Text(model) => model.queue.clear(),
        }
    }

    /// Whether all threads have ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).iter().all(JoinHandle::is_finished)
    }
}

impl Drop for Served {
    /// Threads that wait for requests end, and give their models' memory back.
    fn drop(&mut self) {
        self.close();
    }
}

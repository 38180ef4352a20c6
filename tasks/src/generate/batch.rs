//! Sequences that come and go, and are computed together meanwhile.

mod arrange;
mod size;

pub use size::CacheSize;

use super::cache::successors;
use super::{LanguageModel, Logits, Score};
use crate::error::{Error, Result};
use moh_runtime::names::{ATTENTION_MASK, INPUT_IDS, POSITION_IDS};
use moh_runtime::{Tensor, Value};

/// Steps that a batch keeps more rows than it needs: another sequence may join meanwhile.
const PATIENCE: usize = 32;

/// A sequence of a [`Batch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SequenceId(u64);

/// A language model's sequences in one cache, each with a length of its own: they join and leave between steps, and each gets the tokens that it
/// would get alone. This needs a cache in place; a model whose cache is concatenated has a batch of one sequence.
#[derive(Debug)]
pub struct Batch {
    model: LanguageModel,
    slots: usize,
    /// The cache's rows: those without a sequence are computed, but nothing comes of it. There are never more than twice as many as needed
    /// for long.
    rows: Vec<Option<Row>>,
    cache: Vec<Value>,
    /// Tokens that a row has room for.
    capacity: usize,
    /// The model's longest sequence.
    longest: usize,
    /// Steps since more than half of the rows were needed.
    spare: usize,
    named: u64,
}

#[derive(Debug, Clone, Copy)]
struct Row {
    id: SequenceId,
    /// Tokens in the cache.
    length: usize,
    /// The most that there will be.
    most: usize,
}

/// A prompt on its way into a batch: it is read in parts, so that other sequences need not wait for all of it.
#[derive(Debug)]
pub struct Reading {
    prompt: Vec<i64>,
    /// Tokens of the sequence, at most.
    most: usize,
    read: usize,
    cache: Vec<Value>,
    /// Most probable tokens of each place that are wanted beside its own; `None`: nobody asks how probable the prompt is.
    top: Option<usize>,
    scores: Vec<Score>,
}

impl Reading {
    /// Asks how probable the prompt's tokens are, before any of it is read, with the `top` most probable ones of each place.
    #[must_use]
    pub fn scored(mut self, top: usize) -> Reading {
        self.top = Some(top);
        self
    }

    /// What was asked for with [`Reading::scored`], of the tokens that were read, except for the first one, which follows nothing.
    pub fn scores(&mut self) -> Vec<Score> {
        std::mem::take(&mut self.scores)
    }

    /// The prompt's tokens that were not read yet.
    pub fn left(&self) -> usize {
        self.prompt.len() - self.read
    }
}

impl Batch {
    /// An empty batch of at most `slots` sequences, none of them longer than `longest` tokens.
    pub fn new(model: LanguageModel, slots: usize, longest: Option<usize>) -> Batch {
        let slots = if model.interface.in_place { slots.max(1) } else { 1 };
        let longest = longest.unwrap_or(usize::MAX);
        Batch { model, slots, rows: Vec::new(), cache: Vec::new(), capacity: 0, longest, spare: 0, named: 0 }
    }

    /// The model.
    pub fn model(&self) -> &LanguageModel {
        &self.model
    }

    /// The model, to run it on something else between two steps.
    pub fn model_mut(&mut self) -> &mut LanguageModel {
        &mut self.model
    }

    /// The most sequences.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.rows.iter().flatten().count()
    }

    /// Bytes of the cache at most, if a sequence of at most `most` tokens joins, `prompt` of them a prompt that is read before.
    pub fn bytes_with(&self, prompt: usize, most: usize) -> usize {
        let rows = self.rows.len().max(arrange::needed_rows(self.sequences() + 1, self.slots));
        let room = self.rows.iter().flatten().map(|row| row.most).fold(self.capacity.max(most), usize::max);
        self.model.cache_size().bytes(rows, room.min(self.longest), prompt)
    }

    /// Begins to read a prompt of a sequence that will have at most `most` tokens.
    ///
    /// # Errors
    /// [`Error::Prompt`] for one without tokens, or with more than the longest sequence has.
    pub fn read(&self, prompt: Vec<i64>, most: usize) -> Result<Reading> {
        if prompt.is_empty() {
            return Err(Error::Prompt("it has no tokens".to_owned()));
        }
        if prompt.len() > self.longest {
            return Err(Error::Prompt(format!("{} tokens, the longest sequence has {}", prompt.len(), self.longest)));
        }
        let room = if self.model.interface.in_place { prompt.len() } else { 0 };
        let most = most.max(prompt.len()).min(self.longest);
        let cache = self.model.interface.new_cache(&self.model.model, 1, room)?;
        Ok(Reading { cache, prompt, most, read: 0, top: None, scores: Vec::new() })
    }

    /// Reads at most `tokens` more of a prompt (at least one); gives the logits of its last token when it is read to the end. Sequences of
    /// the batch are not touched, also where this fails.
    ///
    /// # Errors
    /// [`Error::Runtime`] where the runtime fails, [`Error::Output`] where the logits are not numbers, or, of a prompt whose tokens are scored,
    /// not finite.
    pub fn advance(&mut self, reading: &mut Reading, tokens: usize) -> Result<Option<Logits>> {
        let until = reading.prompt.len().min(reading.read + tokens.max(1));
        let new = &reading.prompt[reading.read..until];
        let width = if self.model.interface.in_place { reading.prompt.len() } else { until };
        let mask = (0..width).map(|i| i64::from(i < until)).collect();
        let positions = (reading.read as i64..until as i64).collect();
        let call = Call { rows: 1, ids: new.to_vec(), mask, positions };
        let cache = std::mem::take(&mut reading.cache);
        let (logits, cache) = self.model.call(call, cache)?;
        let new = until - reading.read;
        if let Some(top) = reading.top {
            let following = &reading.prompt[reading.read + 1..reading.prompt.len().min(until + 1)];
            let rows = self.model.rows(&logits, [1, new], 0..following.len())?;
            for (row, &token) in rows.iter().zip(following) {
                let score = Score::new(&row.get(), token, top);
                reading.scores.push(score.ok_or_else(|| self.model.bad_logits("one is not finite".to_owned()))?);
            }
        }
        let last = self.model.last_logits(&logits, 1, new)?;
        reading.cache = cache;
        reading.read = until;
        Ok(if reading.left() == 0 { last.into_iter().next() } else { None })
    }

    /// Takes a sequence in whose prompt was read to the end.
    ///
    /// # Errors
    /// [`Error::Request`] where all slots are taken or the prompt was not read to the end; [`Error::Runtime`] where its cache cannot be copied: the
    /// batch is empty then.
    pub fn join(&mut self, reading: Reading) -> Result<SequenceId> {
        let refused = |reason: String| Error::Request { path: self.model.model.path().to_owned(), reason };
        if reading.left() > 0 {
            return Err(refused(format!("{} tokens of the prompt were not read", reading.left())));
        }
        if self.sequences() >= self.slots {
            return Err(refused(format!("all {} slots are taken", self.slots)));
        }
        let id = SequenceId(self.named);
        self.named += 1;
        let row = Row { id, length: reading.prompt.len(), most: reading.most };
        if self.model.interface.in_place {
            let placed = self.place(row, &reading.cache);
            placed.inspect_err(|_| self.clear())?;
        } else {
            (self.rows, self.cache) = (vec![Some(row)], reading.cache);
        }
        Ok(id)
    }

    /// Takes a sequence out.
    pub fn leave(&mut self, id: SequenceId) {
        for row in self.rows.iter_mut().filter(|row| row.is_some_and(|row| row.id == id)) {
            *row = None;
        }
        if self.sequences() == 0 {
            self.clear();
        }
    }

    /// Takes all sequences out, and gives their memory back.
    pub fn clear(&mut self) {
        (self.rows, self.cache, self.capacity, self.spare) = (Vec::new(), Vec::new(), 0, 0);
    }

    /// Appends to every sequence its `next` token, and gives the logits of the one after that. After an error the batch is empty.
    ///
    /// # Errors
    /// [`Error::Runtime`] where the runtime fails, [`Error::Output`] where the logits are not numbers, [`Error::Request`] for a sequence that is
    /// as long as it can be.
    pub fn step(&mut self, next: impl Fn(SequenceId) -> i64) -> Result<Vec<(SequenceId, Logits)>> {
        let stepped = self.try_step(next);
        if stepped.is_err() {
            self.clear();
        }
        stepped
    }

    fn try_step(&mut self, next: impl Fn(SequenceId) -> i64) -> Result<Vec<(SequenceId, Logits)>> {
        self.make_room()?;
        let width = |row: Row| if self.model.interface.in_place { self.capacity } else { row.length + 1 };
        let mut call = Call { rows: self.rows.len(), ids: Vec::new(), mask: Vec::new(), positions: Vec::new() };
        for row in &self.rows {
            // Nothing is read of the row of no sequence; its token must only be one.
            let (id, length, width) = row.map_or((0, 0, self.capacity), |row| (next(row.id), row.length, width(row)));
            call.ids.push(id);
            call.positions.push(length as i64);
            call.mask.extend((0..width).map(|i| i64::from(row.is_some() && i <= length)));
        }
        let rows = call.rows;
        let (logits, cache) = self.model.call(call, std::mem::take(&mut self.cache))?;
        self.cache = cache;
        let logits = self.model.last_logits(&logits, rows, 1)?;
        let mut found = Vec::with_capacity(self.rows.len());
        for (row, logits) in self.rows.iter_mut().zip(logits) {
            if let Some(row) = row {
                row.length += 1;
                found.push((row.id, logits));
            }
        }
        Ok(found)
    }
}

/// A run of the model on new tokens of some sequences.
struct Call {
    rows: usize,
    ids: Vec<i64>,
    mask: Vec<i64>,
    positions: Vec<i64>,
}

impl LanguageModel {
    /// The logits of every row's new tokens, and the cache with these.
    fn call(&mut self, call: Call, cache: Vec<Value>) -> Result<(Value, Vec<Value>)> {
        let Call { rows, ids, mask, positions } = call;
        let matrix = |numbers: Vec<i64>| Tensor::new([rows, numbers.len() / rows.max(1)], numbers).map(Value::from);
        let mut inputs = vec![(INPUT_IDS.to_owned(), matrix(ids)?), (ATTENTION_MASK.to_owned(), matrix(mask)?)];
        if self.interface.takes_positions {
            inputs.push((POSITION_IDS.to_owned(), matrix(positions)?));
        }
        inputs.extend(self.interface.cache.iter().map(|entry| entry.input.clone()).zip(cache));
        let shared = self.interface.cache.iter().filter(|_| self.interface.in_place);
        let shared: Vec<(&str, usize)> = shared.map(|entry| (entry.input.as_str(), entry.output)).collect();
        let outputs = self.model.run_in_place(inputs, &shared)?;
        let logits = outputs[self.interface.logits].clone();
        Ok((logits, successors(&self.interface, outputs)))
    }
}

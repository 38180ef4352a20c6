//! A MoA graph's inputs and outputs, and calls to try it with.

use super::Moa;
use super::config::{Calls, Part};
use crate::families::{Port, PortDim, Sizes, Workload};
use crate::ops::Type;
use crate::sample::{Rng, Sample, SampleData};

const BATCH: PortDim = PortDim::Named("batch");
const SEQUENCE: PortDim = PortDim::Named("sequence");
const PAST: PortDim = PortDim::Named("past");
/// Cached and new tokens. tract reads the name as the sum that it is.
const TOTAL: PortDim = PortDim::Named("past+sequence");
const SOURCE: PortDim = PortDim::Named("encoder_sequence");
const SOURCE_PAST: PortDim = PortDim::Named("encoder_past");
const SOURCE_TOTAL: PortDim = PortDim::Named("encoder_past+encoder_sequence");

/// Name of a cache: `of` is decoder (the target's) or encoder (the source's), `kind` key or value.
pub(super) fn past_name(layer: usize, of: &str, kind: &str) -> String {
    cache_name("past_key_values", layer, of, kind)
}

fn cache_name(prefix: &str, layer: usize, of: &str, kind: &str) -> String {
    format!("{prefix}.{layer}.{of}.{kind}")
}

fn tokens(model: &Moa) -> Port {
    match &model.embedding {
        Some(_) => Port::new("input_ids", Type::I64, &[BATCH, SEQUENCE]),
        None => Port::new("inputs_embeds", Type::Model, &[BATCH, SEQUENCE, PortDim::Fixed(model.settings.width)]),
    }
}

/// The lengths of caches: of the target, and of the source where those are among them.
fn caches(model: &Moa, prefix: &str, target: PortDim, source: Option<PortDim>) -> Vec<Port> {
    let (one, width) = (PortDim::Fixed(1), PortDim::Fixed(model.settings.head_dim));
    let port = |layer: usize, of: &str, kind: &str, length: PortDim| {
        Port::new(cache_name(prefix, layer, of, kind), Type::Model, &[BATCH, one, length, width])
    };
    let layer = |i: usize| {
        [Some(("decoder", target)), source.map(|length| ("encoder", length))]
            .into_iter()
            .flatten()
            .flat_map(move |(of, length)| [port(i, of, "key", length), port(i, of, "value", length)])
    };
    (0..model.settings.layers).flat_map(layer).collect()
}

pub(super) fn inputs(model: &Moa) -> Vec<Port> {
    let mut ports = vec![tokens(model)];
    match model.settings.part {
        Part::Encoder => ports.push(Port::new("attention_mask", Type::I64, &[BATCH, SEQUENCE])),
        Part::Decoder => {
            let calls = model.settings.calls;
            let width = PortDim::Fixed(model.settings.source_width);
            if calls != Calls::Later {
                ports.push(Port::new("encoder_hidden_states", Type::Model, &[BATCH, SOURCE, width]));
            }
            let total = match calls {
                Calls::All => SOURCE_TOTAL,
                Calls::First => SOURCE,
                Calls::Later => SOURCE_PAST,
            };
            ports.push(Port::new("encoder_attention_mask", Type::I64, &[BATCH, total]));
            if calls != Calls::First {
                ports.extend(caches(model, "past_key_values", PAST, Some(SOURCE_PAST)));
            }
        }
    }
    ports
}

pub(super) fn outputs(model: &Moa) -> Vec<Port> {
    let (name, width) = match (&model.head, &model.embedding) {
        (Some(_), Some(embedding)) => ("logits", embedding.vocab_size()),
        _ => ("last_hidden_state", model.settings.width),
    };
    let mut ports = vec![Port::new(name, Type::Model, &[BATCH, SEQUENCE, PortDim::Fixed(width)])];
    if model.settings.part == Part::Decoder {
        let (target, source) = match model.settings.calls {
            Calls::All => (TOTAL, Some(SOURCE_TOTAL)),
            Calls::First => (SEQUENCE, Some(SOURCE)),
            // What the call before gave still holds.
            Calls::Later => (TOTAL, None),
        };
        ports.extend(caches(model, "present", target, source));
    }
    ports
}

/// The longest sequence that the model takes; a million where nothing limits it.
fn longest(model: &Moa) -> usize {
    model.embedding.as_ref().and_then(|embedding| embedding.max_positions()).unwrap_or(1 << 20)
}

pub(super) fn workload(model: &Moa) -> Workload {
    let n = model.settings.max_positions.min(longest(model)).clamp(1, 512);
    let mut sizes = vec![("batch", 1), ("sequence", n)];
    if model.settings.part == Part::Decoder {
        let target = [("past", 0), ("past+sequence", n)];
        sizes.extend(target);
        // A source that is not given is cached.
        let cached = if model.settings.calls == Calls::Later { n } else { 0 };
        sizes.extend([("encoder_past", cached), ("encoder_sequence", n), ("encoder_past+encoder_sequence", n)]);
    }
    Workload { sizes, tokens: n }
}

/// The sizes of a call: its rows, and of the target and the source, what is cached and what is new.
struct Lengths {
    rows: usize,
    past: usize,
    sequence: usize,
    source_past: usize,
    source: usize,
}

pub(super) fn samples(model: &Moa, sizes: &Sizes) -> Vec<Vec<Sample>> {
    let (rng, rows) = (&mut Rng::new(4), sizes.or("batch", 3));
    match model.settings.part {
        Part::Encoder => {
            let lengths = [7.min(longest(model)).max(1), 1];
            lengths.map(|length| encoder_sample(model, rng, rows, sizes.or("sequence", length))).into()
        }
        Part::Decoder => {
            // A target's beginning, its next token and some more tokens, with the source in the cache; another target on a
            // source of which a part is new, as nobody needs to call it.
            let calls = [(0, 4, 0, 6), (4, 1, 6, 0), (2, 3, 6, 0), (1, 2, 3, 4)];
            let lengths = calls.map(|(past, sequence, source_past, source)| Lengths {
                rows,
                past: sizes.or("past", past),
                sequence: sizes.or("sequence", sequence),
                source_past: sizes.or("encoder_past", source_past),
                source: sizes.or("encoder_sequence", source),
            });
            let fits = |lengths: &&Lengths| {
                let of_calls = match model.settings.calls {
                    Calls::All => true,
                    Calls::First => lengths.past + lengths.source_past == 0,
                    Calls::Later => lengths.source == 0,
                };
                of_calls && lengths.past + lengths.sequence <= longest(model)
            };
            lengths.iter().filter(fits).map(|lengths| decoder_sample(model, rng, lengths)).collect()
        }
    }
}

fn token_sample(model: &Moa, rng: &mut Rng, rows: usize, sequence: usize) -> Sample {
    match &model.embedding {
        Some(embedding) => rng.ids("input_ids", &[rows, sequence], embedding.vocab_size()),
        None => rng.normals("inputs_embeds", &[rows, sequence, model.settings.width]),
    }
}

/// A mask whose rows are without padding, padded on the right, and padded on the left.
fn mask_sample(name: &str, rows: usize, length: usize) -> Sample {
    let kept = |row: usize, i: usize| match row {
        0 => true,
        1 => i < length.div_ceil(2),
        _ => i >= length / 3,
    };
    let data = (0..rows).flat_map(|row| (0..length).map(move |i| i64::from(kept(row, i)))).collect();
    Sample { name: name.to_owned(), shape: vec![rows, length], data: SampleData::I64(data) }
}

fn encoder_sample(model: &Moa, rng: &mut Rng, rows: usize, sequence: usize) -> Vec<Sample> {
    vec![token_sample(model, rng, rows, sequence), mask_sample("attention_mask", rows, sequence)]
}

fn decoder_sample(model: &Moa, rng: &mut Rng, lengths: &Lengths) -> Vec<Sample> {
    let Lengths { rows, past, sequence, source_past, source } = *lengths;
    let mut tokens = token_sample(model, rng, rows, sequence);
    if let (Some(embedding), SampleData::I64(ids)) = (&model.embedding, &mut tokens.data)
        && sequence > 1
        && rows > 1
    {
        // The second row ends in padding.
        ids[2 * sequence - 1] = embedding.padding_idx as i64;
    }
    let mut samples = vec![
        tokens,
        rng.normals("encoder_hidden_states", &[rows, source, model.settings.source_width]),
        mask_sample("encoder_attention_mask", rows, source_past + source),
    ];
    for layer in 0..model.settings.layers {
        for (of, length) in [("decoder", past), ("encoder", source_past)] {
            for kind in ["key", "value"] {
                samples.push(rng.normals(&past_name(layer, of, kind), &[rows, 1, length, model.settings.head_dim]));
            }
        }
    }
    let inputs = inputs(model);
    samples.retain(|sample| inputs.iter().any(|input| input.name == sample.name));
    samples
}

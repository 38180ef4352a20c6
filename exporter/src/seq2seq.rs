//! Encoder and decoder of one checkpoint as Optimum wants them: three models on one weight file.
//!
//! `encoder_model.onnx`; `decoder_model.onnx` for the first token, without caches among its inputs; `decoder_with_past_model.onnx`
//! for the others, which reads the source from the caches.

use crate::cache::Cache;
use crate::chosen::Chosen;
use crate::encode::encode;
use crate::error::Error;
use crate::graph::{Dim, ElementType, Graph, Initializer, Source};
use crate::place::{Layout, Place};
use crate::proto::GraphProto;
use crate::quantize::{Quantization, QuantizationReport};
use crate::report::Report;
use crate::side_files::{self, Facts, Kind};
use crate::staging::OutputFile;
use crate::staging::Staging;
use crate::verify::{Subject, Verification};
use crate::weights::{INLINE_BYTES, Plan};
use crate::{Options, Part, passes, quantize, record};
use crate::{
    check_output, check_part, check_passes, check_sizes, check_target, check_versions, choose_dtype, not_ignored, open,
    skipped,
};
use moh_models::families::moa::DECODER_CALLS;
use moh_models::{Checkpoint, Model};
use moh_runtime::names;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Instant;

/// The models, in the order in which they are called.
const MODELS: [&str; 3] = ["encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"];

/// The weights of all of them: no name that another model's have.
const DATA: &str = "encoder_decoder.onnx_data";

/// What fairseq's dictionaries say, unless the configuration does.
const PADDING: u64 = 1;
const END: i64 = 2;

/// Which of the calls, [`DECODER_CALLS`], a decoder's graph is for; `None` for one that is for all, and for other graphs.
pub(crate) fn calls_of(graph: &GraphProto) -> Option<&'static str> {
    let has = |start: &str| graph.input.iter().any(|input| input.name().starts_with(start));
    match (has("encoder_attention_mask"), has(names::PAST), has("encoder_hidden_states")) {
        (true, false, _) => Some("first"),
        (true, true, false) => Some("later"),
        _ => None,
    }
}

/// A part of the model.
struct Graphs {
    model: Model,
    /// As recorded, before the passes.
    recorded: Graph,
    /// As written.
    graph: Graph,
    quantization: Option<Quantization>,
}

/// Exports the checkpoint at `path` to the folder `output`.
pub(crate) fn export(path: &Path, output: &Path, options: &Options) -> Result<Report, Error> {
    let started = Instant::now();
    let ir_version = check_versions(options)?;
    check_passes(options)?;
    if output.extension().is_some_and(|extension| extension == "onnx") {
        return Err(Error::OutputOfParts { path: output.to_owned() });
    }
    if let Some(reference) = &options.reference {
        let problem = "its inputs and outputs are one model's, and both parts are three: compare each part with --part"
            .to_owned();
        return Err(Error::Reference { file: reference.path.clone(), problem });
    }
    let checkpoint = open(path, options)?;
    let place = Place { data: DATA.to_owned(), ..Place::new(&output.join(MODELS[0]), options.layout) };
    check_output(&place, &MODELS, &checkpoint, options)?;
    let load = |part: Part, calls: Option<&str>| {
        let mut checkpoint = checkpoint.clone();
        checkpoint.configure("part", part.name());
        if let Some(calls) = calls {
            checkpoint.configure(DECODER_CALLS, calls);
        }
        let model = Model::load(&checkpoint, options.family.as_deref())?;
        check_part(Some(part), &model)?;
        Ok::<_, Error>(model)
    };
    let models = [load(Part::Encoder, None)?, load(Part::Decoder, Some("first"))?, load(Part::Decoder, Some("later"))?];
    models.iter().try_for_each(|model| Cache::check(options, model))?;
    check_sizes(&options.sizes, &models)?;
    let (dtype, note) = choose_dtype(&models[1], options);
    check_target(options, dtype)?;
    let recording = record::Options { dtype, opset: options.opset, ir_version };
    let graphs = models.into_iter().map(|model| {
        let mut recorded = record::record_sized(&model, recording, &options.sizes)?;
        passes::before_quantization(&mut recorded, &options.passes)?;
        Ok(Graphs { model, graph: recorded.clone(), recorded, quantization: None })
    });
    let mut graphs: Vec<Graphs> = graphs.collect::<Result<_, Error>>()?;
    if let Some(how) = &options.quantize {
        let mut recorded: Vec<&mut Graph> = graphs.iter_mut().map(|part| &mut part.recorded).collect();
        let quantized = quantize::apply_all(&mut recorded, how)?;
        for (part, quantization) in graphs.iter_mut().zip(quantized) {
            part.quantization = Some(quantization);
        }
    }
    for part in &mut graphs {
        part.graph = part.recorded.clone();
        passes::run(&mut part.graph, &options.passes)?;
    }
    let [encoder, decoder, later] = graphs.as_slice() else {
        return Err(moh_models::Error::Internal("not three graphs").into());
    };
    let union = union(&graphs)?;
    let mut plan = Plan::with(&union, options.weights, dtype, &place)?;

    let external = plan.iter().next().is_some();
    let mut facts = Facts::new(&checkpoint, &decoder.model, &decoder.graph, dtype, (options.layout, &place), external)?;
    if options.layout != Layout::Triton && encoder.graph.inputs.iter().any(|input| input.name == names::INPUT_IDS) {
        facts.kind = Kind::Translator;
        facts.translator = translator(&checkpoint, encoder, decoder, &facts);
    }
    let chosen = Chosen::new(&facts, &[&encoder.graph, &decoder.graph, &later.graph], options)?;
    let (sides, side_notes) = side_files::side_files(&facts, &options.sides)?;
    // Refused before the work. All are prepared: another export may change those that are there already.
    side_files::missing(&sides, &place, &MODELS, options.force)?;

    let mut staging = Staging::at(place.clone())?;
    staging.keep(checkpoint.files());
    let mut prepare = |staging: &mut Staging| {
        staging.begin(&mut plan, &union, &sides, options)?;
        staging.add_data(&union, &plan, options)?;
        let mut found = Vec::new();
        for (name, part) in MODELS.iter().zip([encoder, decoder, later]) {
            staging.add_model(name);
            staging.add_file(name, &encode(&part.graph, &plan, DATA)?)?;
            let Graphs { model, recorded, graph, quantization } = part;
            let quantization = quantization.as_ref();
            let subject = Subject { model, recorded, graph, plan: &plan, dtype, options, quantization };
            found.push(subject.check(staging, skipped(&part.model, dtype, options)?, None)?.0);
        }
        Ok(found)
    };
    let found = prepare(&mut staging).map_err(|error| staging.at_output(error))?;
    let turn = staging.turn();
    let (missing, kept) = side_files::missing(&sides, &place, &MODELS, options.force)?;
    let names: Vec<String> = missing.into_iter().map(|side| side.name).collect();
    let files = staging.commit(turn, &names)?;
    let notes = note.into_iter().map(str::to_owned).chain(plan.note(options.weights));
    let routing = graphs.iter().filter_map(|part| part.quantization.as_ref()?.note()).take(1);
    let styles = options.passes.notes(&[&encoder.graph, &decoder.graph, &later.graph], options.target);
    let notes = notes.chain(routing).chain(styles).chain(side_notes).chain(kept);
    let notes = notes.chain(not_ignored(&[&encoder.model, &decoder.model, &later.model], options)).collect();
    let mut report = report(&checkpoint, [&encoder.model, &decoder.model], dtype, notes, files, worst(found), started)?;
    let quantized = graphs.iter().filter_map(|part| part.quantization.as_ref());
    report.quantization = options.quantize.as_ref().map(|how| QuantizationReport::of(how, quantized));
    report.target = chosen;
    Ok(report)
}

/// A graph with the large constants of all of them, each once.
fn union(graphs: &[Graphs]) -> Result<Graph, Error> {
    let mut all: BTreeMap<String, Initializer> = BTreeMap::new();
    let mut order = Vec::new();
    for init in graphs.iter().flat_map(|part| &part.graph.initializers).filter(|init| init.bytes() >= INLINE_BYTES) {
        match all.get(&init.name) {
            None => {
                order.push(init.name.clone());
                all.insert(init.name.clone(), init.clone());
            }
            Some(known) if same(known, init) => {}
            Some(_) => return Err(moh_models::Error::Internal("two tensors of one name").into()),
        }
    }
    let mut graph = graphs.first().map(|part| part.graph.clone()).ok_or(moh_models::Error::Internal("no graph"))?;
    graph.initializers = order.iter().filter_map(|name| all.remove(name)).collect();
    Ok(graph)
}

fn same(a: &Initializer, b: &Initializer) -> bool {
    let sources = match (&a.source, &b.source) {
        (Source::Bytes(a), Source::Bytes(b)) => a == b,
        (Source::Weight { weight: a, transposed: x }, Source::Weight { weight: b, transposed: y }) => {
            x == y && a.name() == b.name() && a.shape() == b.shape()
        }
        (Source::Quantized { matrix: a, order: x, piece: i }, Source::Quantized { matrix: b, order: y, piece: j }) => {
            a.same(b) && x == y && i == j
        }
        _ => false,
    };
    sources && a.ty == b.ty && a.dims == b.dims
}

/// What transformers' MarianConfig says of a model.
fn translator(
    checkpoint: &Checkpoint,
    encoder: &Graphs,
    decoder: &Graphs,
    facts: &Facts<'_>,
) -> Vec<(&'static str, Value)> {
    let config = checkpoint.config();
    let last = |graph: &Graph| match graph.outputs.first().and_then(|output| output.dims.last()) {
        Some(Dim::Fixed(n)) => *n,
        _ => 0,
    };
    let tokens = encoder.model.tensors().iter().find(|(name, _)| name.ends_with("embed_tokens.weight"));
    let source = tokens.and_then(|(_, shape)| shape.first().copied()).unwrap_or(0);
    let target = last(&decoder.graph);
    let end = facts.tokens.first_end().unwrap_or(END);
    let start = config.value("decoder_start_token_id").cloned().unwrap_or(json!(end));
    let padding = config.value("padding_idx").and_then(Value::as_u64).unwrap_or(PADDING);
    let mut keys = vec![
        ("is_encoder_decoder", json!(true)),
        ("d_model", json!(last(&encoder.graph))),
        ("vocab_size", json!(source)),
        ("pad_token_id", json!(padding)),
        ("eos_token_id", json!(end)),
        ("decoder_start_token_id", start),
        ("forced_eos_token_id", Value::Null),
    ];
    if source != target {
        keys.extend([("encoder_vocab_size", json!(source)), ("decoder_vocab_size", json!(target))]);
    }
    keys
}

/// What verification found in all models, as of one.
fn worst(found: Vec<Verification>) -> Verification {
    let joined = found.into_iter().reduce(|all, one| match (all, one) {
        (Verification::Agrees(mut all), Verification::Agrees(one)) => {
            all.error = all.error.max(one.error);
            all.given_gates |= one.given_gates;
            all.rows += one.rows;
            all.rerouted += one.rerouted;
            Verification::Agrees(all)
        }
        (Verification::Skipped(why), _) | (_, Verification::Skipped(why)) => Verification::Skipped(why),
    });
    joined.unwrap_or(Verification::Skipped(String::new()))
}

/// The report of both parts.
fn report(
    checkpoint: &Checkpoint,
    parts: [&Model; 2],
    dtype: ElementType,
    notes: Vec<String>,
    files: Vec<OutputFile>,
    found: Verification,
    started: Instant,
) -> Result<Report, Error> {
    let [encoder, decoder] = parts;
    let mut report = Report::new(checkpoint, decoder, dtype, notes, files, (found, None), started.elapsed())?;
    report.layers.splice(0..0, encoder.layers());
    let (active, all) = report
        .layers
        .iter()
        .fold((0, 0), |(active, all), layer| (active + layer.heads.active(), all + layer.heads.num_heads));
    report.active_share = active as f64 / all.max(1) as f64;
    // A matrix that both use counts once.
    let tensors: BTreeSet<&(String, Vec<usize>)> = parts.iter().flat_map(|model| model.tensors()).collect();
    report.parameters = tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    let macs = encoder.macs(&encoder.workload().sizes)?;
    report.macs.dense += macs.dense;
    report.macs.routed += macs.routed;
    let new: Vec<_> = encoder.defaults().iter().filter(|default| !report.defaults.contains(default)).cloned().collect();
    report.defaults.extend(new);
    Ok(report)
}

//! Trains a small MoA encoder-decoder to write numbers in digits that are given in words, exports it, and translates numbers that it was
//! not trained on.
//!
//!     cargo run --release --example translate_moa -- target/translate-moa
//!
//! "three hundred five thousand twelve" becomes "3 0 5 0 1 2". The program makes all data itself: numbers below a million, of which every
//! thirteenth is held out.

mod common;

use anyhow::Result;
use candle_core::Tensor;
use common::{Arguments, export, inputs, load, report};
use moh_models::eager::Eager;
use moh_models::families::moa::{DECODER_CALLS, Part};
use moh_models::sample::Rng;
use moh_models::{Config, Model, Parameters};
use moh_tasks::translate::{BeamOptions, TranslationModel};
use moh_train::{Loss, Options, Task, Trainer, loss};

/// fairseq's special tokens come first; then 10 digits, and the words.
const PADDING: i64 = 1;
const END: i64 = 2;
const FIRST_DIGIT: i64 = 4;
const FIRST_WORD: i64 = 14;
const WORDS: [&str; 29] = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
    "thirty",
    "forty",
    "fifty",
    "sixty",
    "seventy",
    "eighty",
    "ninety",
    "hundred",
    "thousand",
];
const CONFIG: &str = r#"{
    "family": "moa", "encoder_layers": 2, "decoder_layers": 2, "encoder_embed_dim": 96, "decoder_embed_dim": 96, "head_dim": 24,
    "num_expert": 8, "attention_heads": 3, "ffn_embed_dim": 192, "vocab_size": 43, "normalize_before": true,
    "max_source_positions": 64, "max_target_positions": 64
}
"#;
const BATCH: usize = 64;
/// Every so manieth number is not trained on.
const HELD_OUT: usize = 13;
/// MoA's factors, as in its paper's best model.
const SWITCH: f64 = 0.01;
const Z: f64 = 0.001;

struct Numbers {
    encoder: Model,
    decoder: Model,
}

/// The words of a number from 1 to 999,999.
fn words(n: usize) -> Vec<i64> {
    let word = |i: usize| FIRST_WORD + i as i64;
    let below_thousand = |n: usize, out: &mut Vec<i64>| {
        if n >= 100 {
            out.extend([word(n / 100 - 1), word(27)]);
        }
        match n % 100 {
            0 => {}
            n @ 1..20 => out.push(word(n - 1)),
            n => {
                out.push(word(17 + n / 10));
                out.extend((n % 10 > 0).then(|| word(n % 10 - 1)));
            }
        }
    };
    let mut out = Vec::new();
    if n >= 1000 {
        below_thousand(n / 1000, &mut out);
        out.push(word(28));
    }
    below_thousand(n % 1000, &mut out);
    out.push(END);
    out
}

/// The digits of a number, and the end.
fn digits(n: usize) -> Vec<i64> {
    n.to_string().bytes().map(|digit| FIRST_DIGIT + i64::from(digit - b'0')).chain([END]).collect()
}

/// A number of any length, as often of each.
fn number(rng: &mut Rng, held_out: bool) -> usize {
    loop {
        let least = 10usize.pow(rng.below(6) as u32);
        let n = least + rng.below(9 * least);
        if n.is_multiple_of(HELD_OUT) == held_out {
            return n;
        }
    }
}

impl Task for Numbers {
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> moh_train::Result<Loss> {
        let device = ops.device().clone();
        let numbers: Vec<usize> = (0..BATCH).map(|_| number(rng, false)).collect();
        let padded = |rows: Vec<Vec<i64>>, padding: i64| {
            let width = rows.iter().map(Vec::len).max().unwrap_or(0);
            let cells = rows.iter().flat_map(|row| (0..width).map(|i| row.get(i).copied().unwrap_or(padding)));
            Tensor::from_iter(cells, &device)?.reshape((rows.len(), width))
        };
        let source = padded(numbers.iter().map(|&n| words(n)).collect(), PADDING)?;
        let mask = source.ne(PADDING)?.to_dtype(candle_core::DType::I64)?;
        let given = inputs([("input_ids", source), ("attention_mask", mask.clone())]);
        let states = self.encoder.forward(ops, &given)?.swap_remove(0);
        // The decoder begins with the token that ends texts, as fairseq's.
        let before = |n: usize| -> Vec<i64> {
            let digits = digits(n);
            [END].into_iter().chain(digits[..digits.len() - 1].iter().copied()).collect()
        };
        let given = inputs([
            ("input_ids", padded(numbers.iter().map(|&n| before(n)).collect(), PADDING)?),
            ("encoder_hidden_states", states),
            ("encoder_attention_mask", mask),
        ]);
        let logits = self.decoder.forward(ops, &given)?.swap_remove(0);
        // Padding does not count.
        let targets = padded(numbers.iter().map(|&n| digits(n)).collect(), -1)?;
        let mut parts = vec![("digits", 1.0, loss::cross_entropy(&logits, &targets, 0.05)?)];
        for layer in ops.routing() {
            let experts = layer.experts()?;
            parts.extend([("switch", SWITCH, experts.switch), ("z", Z, experts.z)]);
        }
        let sum = Loss::sum(parts)?;
        Ok(Loss { parts: sum.parts.into_iter().take(3).collect(), ..sum })
    }
}

fn part(part: Part) -> Result<Model> {
    let mut config = Config::new("config.json", serde_json::from_str(CONFIG)?);
    config.set("part", part.name().into());
    // No caches are given in a training.
    config.set(DECODER_CALLS, "first".into());
    Ok(Model::plan(&config, None)?.0)
}

fn main() -> Result<()> {
    moh_train::join_pool();
    let arguments = Arguments::read()?;
    let options = arguments.options(Options {
        steps: 1500,
        learning_rate: 2e-3,
        warmup: 150,
        weight_decay: 0.01,
        final_rate: 0.02,
        save_every: 500,
        report_every: 50,
        ..Options::default()
    });
    let (encoder, decoder) = (part(Part::Encoder)?, part(Part::Decoder)?);
    let files = vec![("config.json".to_owned(), CONFIG.as_bytes().to_vec())];
    let start = Parameters::initial(&[&encoder, &decoder], options.seed, &options.device)?;
    let mut trainer = Trainer::open(&arguments.folder, start, files, options)?;
    eprintln!("{} parameters; {} steps done", trainer.parameters().count(), trainer.step());
    let checkpoint = trainer.train(&mut Numbers { encoder, decoder }, report)?;

    export(&arguments, &checkpoint, Some(Part::Encoder), "encoder.onnx")?;
    let folder = export(&arguments, &checkpoint, Some(Part::Decoder), "decoder.onnx")?;
    let mut model = TranslationModel::new(load(&folder, "encoder.onnx")?, load(&folder, "decoder.onnx")?)?;
    let beam =
        BeamOptions { beams: 2, length_penalty: 1.0, max_tokens: 10, start: END, end: END, padding: Some(PADDING) };
    let (mut rng, mut right, tried) = (Rng::new(1), 0, 200);
    for i in 0..tried {
        let n = number(&mut rng, true);
        let found = model.translate(&words(n), &beam)?;
        let found = found.first().map(|best| best.tokens.clone()).unwrap_or_default();
        right += usize::from(found == digits(n));
        if i < 5 {
            let source = words(n)
                .iter()
                .filter_map(|&id| WORDS.get(usize::try_from(id - FIRST_WORD).ok()?))
                .copied()
                .collect::<Vec<_>>();
            let digits = found
                .iter()
                .filter(|id| (FIRST_DIGIT..FIRST_WORD).contains(id))
                .map(|id| (id - FIRST_DIGIT).to_string());
            println!("{} -> {}", source.join(" "), digits.collect::<String>());
        }
    }
    println!("held out: {right} of {tried} numbers are translated right, in tract");
    Ok(())
}

//! Trains a small MoA encoder-decoder to write numbers in digits that are given in words, exports it, and translates numbers that it was
//! not trained on.
//!
//!     cargo run --release --example translate_moa -- target/translate-moa
//!
//! "three hundred five thousand twelve" becomes "3 0 5 0 1 2". The program makes all data itself: numbers below a million, of which every
//! thirteenth is held out.

mod common;

use anyhow::Result;
use common::numbers::{END, FIRST_DIGIT, FIRST_WORD, Numbers, PADDING, WORDS, digits, number, words};
use common::{Arguments, export, load, report};
use moh_models::Parameters;
use moh_models::families::moa::Part;
use moh_models::sample::Rng;
use moh_tasks::translate::{BeamOptions, TranslationModel};
use moh_train::{Options, Trainer};

const CONFIG: &str = r#"{
    "family": "moa", "encoder_layers": 2, "decoder_layers": 2, "encoder_embed_dim": 96, "decoder_embed_dim": 96, "head_dim": 24,
    "num_expert": 8, "attention_heads": 3, "ffn_embed_dim": 192, "vocab_size": 43, "normalize_before": true,
    "max_source_positions": 64, "max_target_positions": 64
}
"#;

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
    let mut task = Numbers::new(&serde_json::from_str(CONFIG)?)?;
    let files = vec![("config.json".to_owned(), CONFIG.as_bytes().to_vec())];
    let start = Parameters::initial(&task.models(), options.seed, &options.device)?;
    let mut trainer = Trainer::open(&arguments.folder, start, files, options)?;
    eprintln!("{} parameters; {} steps done", trainer.parameters().count(), trainer.step());
    let checkpoint = trainer.train(&mut task, report)?;

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

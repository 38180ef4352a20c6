//! What a conversion costs, measured on a text.

use super::{Case, object};
use crate::support::text;
use candle_core::{D, DType, Device, Tensor};
use moh_export::convert::{Converted, Options, Shares, convert};
use moh_models::eager::Eager;
use moh_models::families::Inputs;
use moh_models::{Checkpoint, Model};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// A trained model, read as a dense one, and its tokenizer.
fn shakespeare() -> Case {
    let case = Case::single();
    let trained = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/checkpoints/shakespeare-moh-llama");
    for name in ["model.safetensors", "tokenizer.json", "config.json"] {
        fs::copy(trained.join(name), case.at("dense").join(name)).unwrap();
    }
    case.set("family", json!("llama"));
    fs::write(case.at("play.txt"), PLAY).unwrap();
    case
}

/// Of the play that the model was trained on: Romeo and Juliet, act 2.
const PLAY: &str = "ROMEO:\nBut, soft! what light through yonder window breaks?\nIt is the east, and Juliet is the sun.\n\
    Arise, fair sun, and kill the envious moon,\nWho is already sick and pale with grief,\n\
    That thou her maid art far more fair than she:\n";

/// Mean cross-entropy by candle's own operations, with all weights in memory.
fn cross_entropy(folder: &Path, tokens: &[i64]) -> f64 {
    let model = Model::load(&Checkpoint::open(folder, None).unwrap(), None).unwrap();
    let (count, device) = (tokens.len(), &Device::Cpu);
    let row = |values: &[i64]| Tensor::from_slice(values, (1, values.len()), device).unwrap();
    let positions: Vec<i64> = (0..count as i64).collect();
    let mut values = vec![
        ("input_ids".to_owned(), row(tokens)),
        ("attention_mask".to_owned(), row(&vec![1; count])),
        ("position_ids".to_owned(), row(&positions)),
    ];
    for (i, layer) in model.layers().iter().enumerate() {
        for kind in ["key", "value"] {
            let empty = Tensor::zeros((1, layer.kv_num_heads, 0, layer.head_dim), DType::F32, device).unwrap();
            values.push((format!("past_key_values.{i}.{kind}"), empty));
        }
    }
    let logits = model.forward(&mut Eager::new(), &Inputs::new(values)).unwrap().swap_remove(0);
    let logits = logits.squeeze(0).unwrap().narrow(0, 0, count - 1).unwrap().to_dtype(DType::F64).unwrap();
    let next = Tensor::from_slice(&tokens[1..], (count - 1, 1), device).unwrap();
    let of_next = logits.gather(&next, 1).unwrap().squeeze(1).unwrap();
    let all = logits.log_sum_exp(D::Minus1).unwrap();
    (all - of_next).unwrap().mean_all().unwrap().to_scalar().unwrap()
}

fn tokens(case: &Case) -> Vec<i64> {
    let tokenizer = tokenizers::Tokenizer::from_file(case.at("dense/tokenizer.json")).unwrap();
    tokenizer.encode(PLAY, true).unwrap().get_ids().iter().map(|&id| i64::from(id)).collect()
}

#[test]
fn both_models_on_a_text() {
    let case = shakespeare();
    let tokens = tokens(&case);
    assert!(tokens.len() > 50, "{}", tokens.len());
    for (i, more) in [&[][..], &["--router", "two-stage"], &["--tokens", "20"]].into_iter().enumerate() {
        let said = case.converted(&[&["--text", "play.txt", "--json"], more].concat());
        let report: Value = serde_json::from_str(&said).unwrap();
        let tokens = if more.contains(&"--tokens") { &tokens[..20] } else { &tokens };
        assert_eq!(report["cost"]["tokens"], tokens.len() - 1);
        for (name, folder) in [("dense", "dense"), ("converted", "moh")] {
            let (found, expected) = (report["cost"][name].as_f64().unwrap(), cross_entropy(&case.at(folder), tokens));
            assert!((found - expected).abs() < 1e-4 * expected, "{more:?}, {name}: {found}, expected {expected}");
        }
        let (dense, converted) = (&report["cost"]["dense"], &report["cost"]["converted"]);
        assert_ne!(dense, converted);
        fs::rename(case.at("moh"), case.at(&format!("moh{i}"))).unwrap();
    }
    let said = case.converted(&["--text", "play.txt"]);
    assert!(said.contains(" dense (") && said.contains(&format!("over {} tokens", tokens.len() - 1)), "{said}");
}

/// With all heads on, nothing is lost; and no more tokens are used than there are positions.
#[test]
fn all_heads_cost_nothing() {
    let case = shakespeare();
    case.set("max_position_embeddings", json!(30));
    let options = |shared, text| Options { shares: Shares { shared, active: 1.0 }, text, ..Options::default() };
    let converted =
        |name: &str, options: &Options| -> Converted { convert(&case.at("dense"), &case.at(name), options).unwrap() };
    let cost = converted("all", &options(1.0, tokens(&case))).cost.unwrap();
    assert_eq!((cost.tokens, cost.dense), (29, cost.converted));
    let cost = converted("chosen", &options(0.5, tokens(&case))).cost.unwrap();
    assert_eq!(cost.dense, cost.converted, "all heads are chosen");
    assert!(converted("none", &options(0.5, vec![5])).cost.is_none());
    assert_eq!(object(&case.at("all/config.json"))["moh_shared_fraction"], json!(1.0));
}

#[test]
fn texts_that_cannot_be_measured() {
    let case = shakespeare();
    let at = |name: &str| -> PathBuf { case.at(name) };
    assert!(case.refused(&["--text", "nothing.txt"]).starts_with("nothing.txt: No such file"));
    fs::write(at("short.txt"), "").unwrap();
    assert_eq!(case.refused(&["--text", "short.txt"]), "short.txt: expected at least 2 tokens, found 0");
    fs::write(at("latin1.txt"), b"gr\xfcn und rot").unwrap();
    let said = case.refused(&["--text", "latin1.txt"]);
    assert!(said.starts_with("latin1.txt: expected a text in UTF-8"), "{said}");
    let done = case.run(&["--tokens", "9"]);
    assert!(!done.status.success() && text(&done.stderr).contains("--text"), "{}", text(&done.stderr));
    let unknown = Options { text: vec![1, 512], ..Options::default() };
    let error = convert(&at("dense"), &at("moh"), &unknown).unwrap_err().to_string();
    assert!(error.contains("\"vocab_size\": expected more than 512, which is a token of the text"), "{error}");

    fs::write(at("dense/tokenizer.json"), "{}").unwrap();
    assert!(case.refused(&["--text", "play.txt"]).starts_with("dense/tokenizer.json: not a tokenizer: "));
    fs::remove_file(at("dense/tokenizer.json")).unwrap();
    let said = case.refused(&["--text", "play.txt"]);
    let expected = "dense/tokenizer.json: --text needs the checkpoint's tokenizer as tokenizer.json, beside the weights: No such file";
    assert!(said.starts_with(expected), "{said}");
}

/// A text that is cut in the middle of a character, because there are more bytes of it than are read.
#[test]
fn a_long_text() {
    let case = shakespeare();
    fs::write(case.at("long.txt"), format!("a{}", "\u{e9}".repeat(1000))).unwrap();
    let said = case.converted(&["--text", "long.txt", "--tokens", "3"]);
    assert!(said.contains("over 2 tokens"), "{said}");
}

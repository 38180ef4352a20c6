//! The published code's numbers. Its tensors are (time, batch, channels), ours (batch, time, channels).

use super::*;
use moh_models::Checkpoint;
use serde_json::Value;
use std::path::Path;

pub(crate) struct Golden {
    pub(crate) model: Model,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) config: Value,
    reference: HashMap<String, Tensor>,
}

impl Golden {
    pub(crate) fn load(case: &str) -> Golden {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(case);
        let checkpoint = Checkpoint::open(&folder, None).unwrap();
        let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
        Golden {
            model: Model::load(&checkpoint, None).unwrap(),
            checkpoint,
            config: serde_json::from_str(&text).unwrap(),
            reference: load(&folder.join("reference.safetensors")),
        }
    }

    /// A tensor with the batch first.
    pub(crate) fn get(&self, name: &str) -> Tensor {
        let value = self.reference.get(name).unwrap_or_else(|| panic!("no {name}"));
        match value.rank() == 3 && !name.starts_with("gates.") {
            true => value.transpose(0, 1).unwrap().contiguous().unwrap(),
            false => value.clone(),
        }
    }

    /// 1 where a token is to be seen; the data has 1 where it is padding.
    pub(crate) fn mask(&self, name: &str) -> Tensor {
        let padding = self.reference[name].to_dtype(DType::I64).unwrap();
        (padding.ones_like().unwrap() - padding).unwrap()
    }

    fn check_taps(&self, taps: &Values) {
        let shown =
            |name: &&String| ["gates.", "tap.", "attn_in.", "attn_out."].iter().any(|prefix| name.starts_with(prefix));
        let names: Vec<&String> = self.reference.keys().filter(shown).collect();
        assert!(names.len() >= 10, "{names:?}");
        for name in names {
            let found = taps.get(name).unwrap_or_else(|| panic!("no {name}"));
            assert_close(found, &self.get(name), name);
            if name.starts_with("gates.") {
                let on = |x: &Tensor| x.ne(0f32).unwrap().flatten_all().unwrap().to_vec1::<u8>().unwrap();
                assert_eq!(on(found), on(&self.get(name)), "{name}: other experts");
            }
        }
    }
}

/// `aux_loss` of the data, with the coefficients of its configuration.
fn check_losses(golden: &Golden, inputs: &Values, layers: usize) {
    let mut eager = Eager::new().with_routing();
    let given = inputs.iter().map(|(name, value)| (name.clone(), value.clone()));
    golden.model.forward(&mut eager, &Inputs::new(given)).unwrap();
    let routing = eager.take_routing();
    assert_eq!(routing.len(), layers);
    let factor = |name: &str| golden.config[name].as_f64().unwrap() as f32;
    let number = |x: &Tensor| x.to_scalar::<f32>().unwrap();
    let total: f32 = routing
        .iter()
        .map(|layer| layer.experts().unwrap())
        .map(|l| {
            factor("cvloss") * number(&l.cv) + factor("switchloss") * number(&l.switch) + factor("zloss") * number(&l.z)
        })
        .sum();
    let expected = golden.reference["aux_loss"].to_vec1::<f32>().unwrap()[0];
    assert!((total - expected).abs() <= 1e-6, "{total}, published {expected}");
    // Two of six experts for every token that is none of the padding.
    let load = routing[0].load().unwrap();
    assert!(load.len() == 6 && load.iter().sum::<f32>() <= 2.0 + 1e-6, "{load:?}");
}

#[test]
fn encoder() {
    let golden = Golden::load("moa-enc-tiny");
    let inputs = Values::from([
        ("inputs_embeds".to_owned(), golden.get("x")),
        ("attention_mask".to_owned(), golden.mask("padding_mask")),
    ]);
    let (outputs, taps) = run(&golden.model, &inputs);
    assert_close(&outputs["last_hidden_state"], &golden.get("out"), "out");
    golden.check_taps(&taps);
    check_losses(&golden, &inputs, 2);
}

#[test]
fn decoder() {
    let golden = Golden::load("moa-dec-tiny");
    let mut inputs = empty_caches(&golden.model, 3);
    inputs.insert("inputs_embeds".to_owned(), golden.get("x"));
    inputs.insert("encoder_hidden_states".to_owned(), golden.get("encoder_out"));
    inputs.insert("encoder_attention_mask".to_owned(), golden.mask("encoder_padding_mask"));
    let (outputs, taps) = run(&golden.model, &inputs);
    assert_close(&outputs["last_hidden_state"], &golden.get("out"), "out");
    golden.check_taps(&taps);
    check_losses(&golden, &inputs, 4);
}

#[test]
fn decoder_step_by_step() {
    let golden = Golden::load("moa-dec-tiny");
    let (x, source, mask) = (golden.get("x"), golden.get("encoder_out"), golden.mask("encoder_padding_mask"));
    for lengths in [vec![1; 9], vec![4, 1, 3, 1], vec![9]] {
        let out = decode_in_steps(&golden.model, &x, &source, &mask, &lengths);
        assert_close(&out, &golden.get("incremental.out"), &format!("{lengths:?}"));
    }
}

/// Keys and values of the source come out of the first call and are given back unchanged by every later one; giving a part of
/// them, and the rest of the source as hidden states, is the same.
#[test]
fn the_source_is_projected_once() {
    let golden = Golden::load("moa-dec-tiny");
    let model = &golden.model;
    let (x, source, mask) = (golden.get("x"), golden.get("encoder_out"), golden.mask("encoder_padding_mask"));
    let step = |i: usize| x.narrow(1, i, 1).unwrap();
    let mut first = empty_caches(model, 3);
    decode(model, &step(0), &source, &mask, &mut first);
    assert_eq!(first["past_key_values.0.encoder.key"].dims(), [3, 1, 11, 32]);
    assert_eq!(first["past_key_values.1.decoder.value"].dims(), [3, 1, 1, 32]);

    let mut second = first.clone();
    let none = source.narrow(1, 0, 0).unwrap();
    let expected = decode(model, &step(1), &none, &mask, &mut second);
    for name in first.keys().filter(|name| name.contains(".encoder.")) {
        assert_eq!(max_abs(&first[name], &second[name]), 0.0, "{name}");
    }

    let mut partly = first;
    for cache in partly.iter_mut().filter(|(name, _)| name.contains(".encoder.")).map(|(_, cache)| cache) {
        *cache = cache.narrow(2, 0, 4).unwrap();
    }
    let found = decode(model, &step(1), &source.narrow(1, 4, 7).unwrap(), &mask, &mut partly);
    assert_close(&found, &expected, "a source in two parts");
}

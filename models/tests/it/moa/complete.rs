//! Complete models: embeddings, positions and heads in f64, and the layers as in the stacks.

use super::oracle::{Oracle, Rows};
use super::synthetic::{Case, SOURCE_WIDTH, VOCAB, WIDTH, complete, config, random};
use super::*;
use moh_models::families::Port;
use serde_json::json;

/// fairseq's padding token.
const PAD: i64 = 1;
const SOURCES: [&[i64]; 3] = [&[4, 9, 17, 22, 2], &[8, 5, 2, PAD, PAD], &[PAD, PAD, PAD, 7, 2]];
const TARGETS: [&[i64]; 3] = [&[2, 11, 3, 20], &[2, 6, PAD, PAD], &[2, 2, 19, PAD]];

fn padding(tokens: &[i64]) -> Vec<bool> {
    tokens.iter().map(|&id| id == PAD).collect()
}

/// fairseq's encoder on one sentence: what is embedded at padded positions is cleared.
fn encode(oracle: &Oracle, root: &str, tokens: &[i64]) -> Rows {
    let padding = padding(tokens);
    let x = oracle.embed(root, tokens).into_iter().zip(&padding);
    let x = x.map(|(x, &padding)| if padding { vec![0.0; x.len()] } else { x }).collect();
    oracle.encoder(root, x, &padding)
}

fn source_inputs() -> Values {
    let masks: Vec<Vec<bool>> = SOURCES.iter().map(|tokens| padding(tokens)).collect();
    let masks: Vec<&[bool]> = masks.iter().map(Vec::as_slice).collect();
    Values::from([("input_ids".to_owned(), ids(&SOURCES)), ("attention_mask".to_owned(), mask_of(&masks))])
}

fn names(ports: &[Port]) -> Vec<&str> {
    ports.iter().map(|port| port.name.as_str()).collect()
}

#[test]
fn encoders() {
    let variants = [
        json!({}),
        json!({"normalize_before": true, "layernorm_embedding": true}),
        json!({"learned_pos": true, "no_scale_embedding": true}),
        json!({"no_token_positional_embeddings": true, "ffd_type": "moe"}),
    ];
    for (i, extra) in variants.into_iter().enumerate() {
        let config = config("encoder", extra);
        let case = Case::new(&config, &random(&complete("encoder", &config), 60 + i as u64));
        let model = case.model();
        assert_eq!(names(&model.inputs()), ["input_ids", "attention_mask"]);
        assert_eq!(names(&model.outputs()), ["last_hidden_state"]);
        let oracle = Oracle::new(&case.checkpoint, &config);
        let (outputs, _) = run(&model, &source_inputs());
        let expected: Vec<_> = SOURCES.iter().map(|tokens| encode(&oracle, "encoder", tokens)).collect();
        assert_close(&outputs["last_hidden_state"], &stacked(&expected), &config.to_string());
    }
}

/// The stack on embeddings that are put in by hand.
#[test]
fn a_complete_model_is_its_stack() {
    let config = config("encoder", json!({}));
    let tensors = random(&complete("encoder", &config), 70);
    let (outputs, _) = run(&Case::new(&config, &tensors).model(), &source_inputs());

    let outside = ["version", "embed_tokens.weight", "embed_positions._float_tensor"].map(|n| format!("encoder.{n}"));
    let stack: HashMap<_, _> = tensors.clone().into_iter().filter(|(name, _)| !outside.contains(name)).collect();
    let table = tensors["encoder.embed_tokens.weight"].to_vec2::<f32>().unwrap();
    let mut embedded = Vec::new();
    for tokens in SOURCES {
        let mut position = 1.0;
        for &id in tokens {
            position += if id == PAD { 0.0 } else { 1.0 };
            for (i, x) in table[id as usize].iter().enumerate() {
                let angle = position / 10_000f64.powf((i % 8) as f64 / 7.0);
                let wave = if i < 8 { angle.sin() } else { angle.cos() };
                embedded.push(if id == PAD { 0.0 } else { (4.0 * f64::from(*x) + wave) as f32 });
            }
        }
    }
    let mut inputs = source_inputs();
    inputs.remove("input_ids");
    let embedded = Tensor::from_vec(embedded, (3, 5, WIDTH), &Device::Cpu).unwrap();
    inputs.insert("inputs_embeds".to_owned(), embedded);
    let (expected, _) = run(&Case::new(&config, &stack).model(), &inputs);
    assert_close(&outputs["last_hidden_state"], &expected["last_hidden_state"], "stack");
}

/// fairseq's `masked_lm`: dense layer, activation, norm, projection to the vocabulary, bias.
fn masked_lm(root: &str, own_projection: bool, extra: serde_json::Value) -> Case {
    let config = config("encoder", extra);
    let mut shapes = complete(root, &config);
    let mut add = |name: &str, shape: &[usize]| shapes.push((format!("encoder.{name}"), shape.to_vec()));
    add("lm_head_transform_weight.weight", &[WIDTH, WIDTH]);
    add("lm_head_transform_weight.bias", &[WIDTH]);
    add("layer_norm.weight", &[WIDTH]);
    add("layer_norm.bias", &[WIDTH]);
    add("lm_output_learned_bias", &[VOCAB]);
    add("masked_lm_pooler.weight", &[WIDTH, WIDTH]);
    add("masked_lm_pooler.bias", &[WIDTH]);
    if own_projection {
        add("embed_out.weight", &[VOCAB, WIDTH]);
    }
    Case::new(&config, &random(&shapes, 80))
}

#[test]
fn masked_language_models() {
    for (root, own_projection, before) in [("encoder.sentence_encoder", true, true), ("encoder", false, false)] {
        let extra = json!({"normalize_before": before, "activation_fn": "gelu"});
        let case = masked_lm(root, own_projection, extra);
        let model = case.model();
        assert_eq!(names(&model.outputs()), ["logits"]);
        assert_eq!(model.layers()[0].path, format!("{root}.layers.0.self_attn"));
        let oracle = Oracle::new(&case.checkpoint, &case.config);
        let bias = case.checkpoint.get("encoder.lm_output_learned_bias").unwrap().to_f32().unwrap();
        let projection = match own_projection {
            true => "encoder.embed_out.weight".to_owned(),
            false => format!("{root}.embed_tokens.weight"),
        };
        let logits = |x: &Vec<f64>| {
            let x = oracle.linear("encoder.lm_head_transform_weight", x);
            let x: Vec<f64> = x.into_iter().map(|x| oracle.activate(x)).collect();
            let y = oracle.product(&projection, &oracle.norm("encoder.layer_norm", &x));
            y.iter().zip(&bias).map(|(y, b)| y + f64::from(*b)).collect()
        };
        let (outputs, _) = run(&model, &source_inputs());
        let expected: Vec<Rows> =
            SOURCES.iter().map(|tokens| encode(&oracle, root, tokens).iter().map(logits).collect()).collect();
        assert_close(&outputs["logits"], &stacked(&expected), "logits");
    }
}

/// Where the head's norm has the name of the stack's last norm, there is no last norm.
#[test]
fn norms_of_one_name() {
    let config = config("encoder", json!({"normalize_before": true}));
    let mut shapes = complete("encoder", &config);
    shapes.push(("encoder.lm_head_transform_weight.weight".to_owned(), vec![WIDTH, WIDTH]));
    shapes.push(("encoder.lm_head_transform_weight.bias".to_owned(), vec![WIDTH]));
    let message = Case::new(&config, &random(&shapes, 81)).refused();
    assert!(message.contains("normalize_before") && message.contains("encoder.layer_norm"), "{message}");
}

/// Without tensors of a head, the key `task` makes the embedding one.
#[test]
fn a_masked_language_model_by_its_task() {
    let config = config("encoder", json!({"task": "masked_lm"}));
    let case = Case::new(&config, &random(&complete("encoder", &config), 85));
    let oracle = Oracle::new(&case.checkpoint, &config);
    let (outputs, _) = run(&case.model(), &source_inputs());
    let logits = |x: &Vec<f64>| oracle.product("encoder.embed_tokens.weight", x);
    let expected: Vec<Rows> =
        SOURCES.iter().map(|tokens| encode(&oracle, "encoder", tokens).iter().map(logits).collect()).collect();
    assert_close(&outputs["logits"], &stacked(&expected), "logits");
}

#[test]
fn decoders() {
    let variants = [
        json!({}),
        json!({"share_decoder_input_output_embed": true, "learned_pos": true}),
        json!({"normalize_before": true, "layernorm_embedding": true, "ffd_type": "moe"}),
    ];
    for (i, extra) in variants.into_iter().enumerate() {
        let config = config("decoder", extra);
        let mut shapes = complete("decoder", &config);
        let shared = config["share_decoder_input_output_embed"] == true;
        if !shared {
            shapes.push(("decoder.output_projection.weight".to_owned(), vec![VOCAB, WIDTH]));
        }
        let case = Case::new(&config, &random(&shapes, 90 + i as u64));
        let model = case.model();
        assert_eq!(names(&model.inputs())[..3], ["input_ids", "encoder_hidden_states", "encoder_attention_mask"]);
        let caches = ["past_key_values.0.decoder.key", "past_key_values.0.decoder.value"];
        assert_eq!(names(&model.inputs())[3..5], caches);
        assert_eq!(names(&model.outputs())[8], "present.1.encoder.value");

        let oracle = Oracle::new(&case.checkpoint, &config);
        let source = normals(5, &[3, 5, SOURCE_WIDTH]);
        let source_padding: Vec<Vec<bool>> = SOURCES.iter().map(|tokens| padding(tokens)).collect();
        let mask = mask_of(&source_padding.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let projection = if shared { "decoder.embed_tokens.weight" } else { "decoder.output_projection.weight" };
        let logits = |b: usize| -> Rows {
            let x = oracle.embed("decoder", TARGETS[b]);
            let x = oracle.decoder(x, &padding(TARGETS[b]), &rows_of(&source, b), &source_padding[b]);
            x.iter().map(|x| oracle.product(projection, x)).collect()
        };
        let expected = stacked(&(0..3).map(logits).collect::<Vec<_>>());
        for lengths in [vec![4], vec![1, 1, 1, 1], vec![2, 2]] {
            let found = decode_in_steps(&model, &ids(&TARGETS), &source, &mask, &lengths);
            assert_close(&found, &expected, &format!("{lengths:?} {config}"));
        }
    }
}

/// One file of both parts, with embeddings that all modules share: stored under every name, or once.
#[test]
fn parts_of_one_checkpoint() {
    let shared = json!({"share_all_embeddings": true, "encoder_embed_dim": WIDTH, "part": null});
    let config = config("decoder", shared);
    let mut shapes = complete("encoder", &config);
    shapes.extend(complete("decoder", &config));
    let mut tensors = random(&shapes, 100);
    for module in ["encoder_attn.k_proj", "encoder_attn.v_proj"] {
        for layer in 0..2 {
            let name = format!("decoder.layers.{layer}.{module}.weight");
            tensors.insert(name, normals(6 + layer, &[synthetic::HEAD_DIM, WIDTH]));
        }
    }
    let table = tensors["encoder.embed_tokens.weight"].clone();
    for name in ["decoder.embed_tokens.weight", "decoder.output_projection.weight"] {
        tensors.insert(name.to_owned(), table.clone());
    }

    let message = Case::new(&config, &tensors).refused();
    assert!(message.contains("\"part\"") && message.contains("encoder or decoder"), "{message}");
    let part = |part: &str, tensors: &HashMap<String, Tensor>| {
        let mut config = config.clone();
        config["part"] = part.into();
        Case::new(&config, tensors)
    };
    let (encoder, decoder) = (part("encoder", &tensors), part("decoder", &tensors));
    let inputs = source_inputs();
    let (outputs, _) = run(&encoder.model(), &inputs);
    let states = &outputs["last_hidden_state"];
    let mask = &inputs["attention_mask"];
    let logits = decode_in_steps(&decoder.model(), &ids(&TARGETS), states, mask, &[4]);

    let oracle = Oracle::new(&encoder.checkpoint, &config);
    let expected: Vec<Rows> = (0..3)
        .map(|b| {
            let source = encode(&oracle, "encoder", SOURCES[b]);
            let x = oracle.embed("encoder", TARGETS[b]);
            let x = oracle.decoder(x, &padding(TARGETS[b]), &source, &padding(SOURCES[b]));
            x.iter().map(|x| oracle.product("encoder.embed_tokens.weight", x)).collect()
        })
        .collect();
    assert_close(&logits, &stacked(&expected), "translation");

    tensors.remove("decoder.embed_tokens.weight");
    tensors.remove("decoder.output_projection.weight");
    let once = decode_in_steps(&part("decoder", &tensors).model(), &ids(&TARGETS), states, mask, &[4]);
    assert_eq!(max_abs(&once, &logits), 0.0);
    tensors.remove("encoder.embed_tokens.weight");
    // safetensors' save_model keeps another name.
    for name in ["decoder.embed_tokens.weight", "decoder.output_projection.weight"] {
        tensors.insert(name.to_owned(), table.clone());
        let (encoder, decoder) = (part("encoder", &tensors), part("decoder", &tensors));
        assert_eq!(max_abs(&run(&encoder.model(), &inputs).0["last_hidden_state"], states), 0.0, "{name}");
        let found = decode_in_steps(&decoder.model(), &ids(&TARGETS), states, mask, &[4]);
        assert_eq!(max_abs(&found, &logits), 0.0, "{name}");
        tensors.remove(name);
    }
}

/// A matrix that the configuration says is the embedding and that has other numbers is told of; the shapes by which a preset is found do not
/// tell whether it is shared, so there it is used.
#[test]
fn an_output_matrix_that_is_not_the_embedding() {
    let config = config("decoder", json!({"share_decoder_input_output_embed": true}));
    let mut shapes = complete("decoder", &config);
    shapes.push(("decoder.output_projection.weight".to_owned(), vec![VOCAB, WIDTH]));
    let mut tensors = random(&shapes, 110);
    let warning = Case::new(&config, &tensors).model().warnings().iter().map(ToString::to_string).collect::<String>();
    assert!(warning.contains("\"decoder.output_projection.weight\" is not used and differs from"), "{warning}");
    assert!(warning.contains("\"share_decoder_input_output_embed\": true puts"), "{warning}");
    tensors.insert("decoder.output_projection.weight".to_owned(), tensors["decoder.embed_tokens.weight"].clone());
    assert!(Case::new(&config, &tensors).model().warnings().is_empty());
}

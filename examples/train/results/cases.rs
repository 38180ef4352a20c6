//! What is compared: tasks, and the models of each.

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

/// A task, whose models are all trained alike.
pub(crate) struct Task {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) kind: Kind,
    /// Steps of each training.
    pub(crate) steps: usize,
    /// Measures of the held-out data; the first is the one that is drawn, and of which less is better.
    pub(crate) measures: &'static [Measure],
    /// What is timed.
    pub(crate) timed: &'static str,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    Classes,
    Noise,
    Numbers,
}

pub(crate) struct Measure {
    pub(crate) name: &'static str,
    /// Digits after the point.
    pub(crate) digits: usize,
}

/// One model of a task.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) config: Map<String, Value>,
    pub(crate) routing: Routing,
}

/// What of a two-stage router is learnt.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Routing {
    /// As the configuration has it.
    Configured,
    /// Without the balance of shared and routed heads, which stays even.
    OneStage,
    /// The first half of the steps is a search for the heads to share.
    Learned,
}

pub(crate) const TASKS: [Task; 4] = [
    Task {
        name: "text",
        title: "Language model: Shakespeare's plays, 4 layers of 8 heads",
        kind: Kind::Text,
        steps: 400,
        measures: &[Measure { name: "nats per token", digits: 4 }],
        timed: "prefill of 512 tokens",
    },
    Task {
        name: "vit",
        title: "Classifier: digits, MoH-ViT of 6 blocks with 32 heads in all",
        kind: Kind::Classes,
        steps: 150,
        measures: &[Measure { name: "nats per digit", digits: 4 }, Measure { name: "% read right", digits: 1 }],
        timed: "16 pictures",
    },
    Task {
        name: "dit",
        title: "Diffusion: digits, MoH-DiT of 6 blocks with 6 heads",
        kind: Kind::Noise,
        steps: 500,
        measures: &[Measure { name: "squared error of the noise", digits: 4 }],
        timed: "16 pictures, one step",
    },
    Task {
        name: "moa",
        title: "Translation: numbers in words to digits, MoA with 3 experts on",
        kind: Kind::Numbers,
        steps: 1500,
        measures: &[Measure { name: "nats per digit", digits: 4 }, Measure { name: "% translated right", digits: 1 }],
        timed: "one number, greedily",
    },
];

impl Task {
    /// The task of that name.
    pub(crate) fn named(name: &str) -> Result<&'static Task> {
        let names: Vec<&str> = TASKS.iter().map(|task| task.name).collect();
        TASKS.iter().find(|task| task.name == name).with_context(|| format!("{name}: expected one of {names:?}"))
    }

    /// The case of that name.
    pub(crate) fn case(&self, name: &str) -> Result<Case> {
        let cases = self.cases();
        let names: Vec<&str> = cases.iter().map(|case| case.name).collect();
        let problem = format!("{name}: expected one of {names:?}");
        cases.into_iter().find(|case| case.name == name).context(problem)
    }

    /// The models; the first is the one that others are compared with.
    pub(crate) fn cases(&self) -> Vec<Case> {
        match self.kind {
            Kind::Text => text(),
            Kind::Classes => classes(),
            Kind::Noise => noise(),
            Kind::Numbers => numbers(),
        }
    }
}

fn case(name: &'static str, title: &'static str, base: &Value, changes: Value) -> Case {
    let mut config = base.as_object().cloned().unwrap_or_default();
    config.extend(changes.as_object().cloned().unwrap_or_default());
    Case { name, title, config, routing: Routing::Configured }
}

fn text() -> Vec<Case> {
    let base = json!({
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    });
    let case = |name, title, changes| case(name, title, &base, changes);
    let moh = |shared: Value, routed: Value| json!({"family": "moh-llm", "shared_head": shared, "routed_head": routed});
    // Every expert is as wide as the dense layer, so a token takes the same work.
    let experts = json!({"moe_num_experts": 2, "moe_top_k": 1});
    let with = |mut config: Value, more: &Value| {
        if let (Some(config), Some(more)) = (config.as_object_mut(), more.as_object()) {
            config.extend(more.clone());
        }
        config
    };
    vec![
        case("dense", "dense", json!({"family": "llama"})),
        case("moh-90", "MoH, 29 of 32 heads", moh(json!([8, 2, 2, 2]), json!([0, 5, 5, 5]))),
        case("moh-75", "MoH, 6 of 8 heads, 2 of them shared", moh(json!(2), json!(4))),
        case("moh-50", "MoH, 4 of 8 heads, 2 of them shared", moh(json!(2), json!(2))),
        case("moh-75-unshared", "MoH, 6 of 8 heads, none shared", moh(json!(0), json!(6))),
        Case {
            routing: Routing::OneStage,
            ..case("moh-75-one-stage", "MoH, 6 of 8 heads, 2 shared, one stage", moh(json!(2), json!(4)))
        },
        Case {
            routing: Routing::Learned,
            ..case("moh-75-learned", "MoH, 6 of 8 heads, shared ones learnt", moh(json!(0), json!(6)))
        },
        case(
            "norms-75",
            "MoH by query norms, 6 of 8 heads, 2 shared",
            json!({"family": "moh-llama", "moh_shared_fraction": 0.25, "moh_routed_fraction": 0.5}),
        ),
        case("moe", "dense, 1 of 2 MLP experts", with(json!({"family": "llama"}), &experts)),
        case("moh-75-moe", "MoH, 6 of 8 heads, and 1 of 2 MLP experts", with(moh(json!(2), json!(4)), &experts)),
        case(
            "gqe-75",
            "Grouped Query Experts, 3 of 4 in each group, 1 shared",
            json!({"family": "gqe-llama", "group_top_k": 2, "group_shared_heads": 1}),
        ),
        case(
            "gqe-50",
            "Grouped Query Experts, 2 of 4 in each group, 1 shared",
            json!({"family": "gqe-llama", "group_top_k": 1, "group_shared_heads": 1}),
        ),
        case(
            "switchhead",
            "SwitchHead, 2 heads of 24, 2 of 3 experts",
            json!({
                "family": "switchhead", "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24, "num_experts": 3, "moe_k": 2,
            }),
        ),
    ]
}

fn classes() -> Vec<Case> {
    let base = json!({
        "img_size": 64, "pretrain_size": 64, "patch_size": 4, "in_chans": 3, "num_classes": 10, "mlp_ratios": [4, 4, 4, 4],
        "qkv_bias": true, "sr_ratios": [8, 4, 2, 1], "window_size": [3, 3, 3, null], "norm_eps": 1e-6, "cpb_hidden": 512,
        "embed_dims": [24, 48, 96, 192], "num_heads": [2, 4, 6, 8], "depths": [1, 1, 3, 1],
    });
    let case = |name, title, changes| case(name, title, &base, changes);
    let moh = |shared: [usize; 4], routed: [usize; 4]| json!({"family": "moh-vit", "shared_head": shared, "routed_head": routed});
    vec![
        case("dense", "dense", json!({"family": "vit"})),
        case("moh-90", "MoH, 29 of 32 heads", moh([2, 4, 2, 8], [0, 0, 3, 0])),
        case("moh-75", "MoH, 24 of 32 heads", moh([2, 4, 2, 2], [0, 0, 2, 4])),
        case("moh-50", "MoH, 16 of 32 heads", moh([2, 1, 1, 1], [0, 1, 2, 2])),
        case("moh-75-unshared", "MoH, 24 of 32 heads, none shared where routed", moh([2, 4, 0, 0], [0, 0, 4, 6])),
        Case {
            routing: Routing::OneStage,
            ..case("moh-75-one-stage", "MoH, 24 of 32 heads, one stage", moh([2, 4, 2, 2], [0, 0, 2, 4]))
        },
        Case {
            routing: Routing::Learned,
            ..case("moh-75-learned", "MoH, 24 of 32 heads, shared ones learnt", moh([2, 4, 0, 0], [0, 0, 4, 6]))
        },
    ]
}

fn noise() -> Vec<Case> {
    let base = json!({
        "input_size": 16, "patch_size": 2, "in_channels": 1, "hidden_size": 96, "depth": 6, "num_heads": 6, "mlp_ratio": 4.0,
        "class_dropout_prob": 0.1, "num_classes": 10, "learn_sigma": true, "norm_eps": 1e-6,
    });
    let case = |name, title, changes| case(name, title, &base, changes);
    let moh = |shared: [usize; 6], routed: [usize; 6]| json!({"family": "moh-dit", "shared_head": shared, "routed_head": routed});
    vec![
        case("dense", "dense", json!({"family": "dit"})),
        case("moh-90", "MoH, 33 of 36 heads", moh([6, 6, 6, 2, 2, 2], [0, 0, 0, 3, 3, 3])),
        case("moh-75", "MoH, 27 of 36 heads", moh([6, 2, 2, 2, 2, 2], [0, 3, 2, 2, 2, 2])),
        case("moh-50", "MoH, 18 of 36 heads", moh([1; 6], [2; 6])),
    ]
}

fn numbers() -> Vec<Case> {
    let base = json!({
        "family": "moa", "encoder_layers": 2, "decoder_layers": 2, "encoder_embed_dim": 96, "decoder_embed_dim": 96, "head_dim": 24,
        "attention_heads": 3, "ffn_embed_dim": 192, "vocab_size": 43, "normalize_before": true, "max_source_positions": 64,
        "max_target_positions": 64,
    });
    let case = |name, title, experts: usize| case(name, title, &base, json!({"num_expert": experts}));
    vec![
        case("experts-8", "3 of 8 experts", 8),
        case("experts-16", "3 of 16 experts", 16),
        case("experts-32", "3 of 32 experts", 32),
    ]
}

//! Keys that other programs write into a configuration, and that do not change what a model computes.

use crate::checkpoint::pattern;

/// The list. `*` stands for any text; a family that asks for one of these keys reads it all the same.
#[rustfmt::skip]
const SILENT: &[&str] = &[
    // Ours, read by moh-run.
    "image_mean", "image_std", "image_resize", "image_interpolation", "id2label", "label2id",
    // What the exporter adds for transformers and transformers.js.
    "transformers.js_config", "d_model",
    // Hugging Face's configurations of every model.
    "_*", "architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype", "name_or_path",
    "tokenizer_class", "*_token_id", "*_token_ids", "*dropout*", "initializer_*", "use_cache", "return_dict*",
    "output_attentions", "output_hidden_states", "output_scores", "torchscript", "use_bfloat16", "tf_legacy_loss",
    "tie_encoder_decoder", "is_encoder_decoder", "is_decoder", "add_cross_attention", "cross_attention_hidden_size",
    "chunk_size_feed_forward", "pretraining_tp", "finetuning_task", "task_specific_params", "problem_type", "num_labels",
    "prefix", "gradient_checkpointing", "attn_implementation",
    // Settings of its generation.
    "bad_words_ids", "max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample", "early_stopping",
    "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "min_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences",
    "forced_*", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    // The hub's and timm's.
    "library_name", "pipeline_tag", "license", "tags", "datasets", "base_model", "hf_hub_id", "url", "hub_*", "architecture",
    "pretrained_cfg", "pretrained", "num_features", "global_pool", "crop_pct", "crop_mode", "interpolation", "mean", "std",
    "first_conv", "classifier", "custom_load",
    // Training: fairseq's, timm's and DiT's. Losses, the noise of MoA's gates, what drops layers, and quantisation noise.
    "arch", "criterion", "task", "gating", "*loss*", "*layerdrop*", "quant_noise_*", "drop_rate", "drop_path*", "*_drop_rate",
    "optimizer*", "opt", "lr*", "*learning_rate", "adam_*", "weight_decay", "momentum", "clip_norm*", "clip_grad*", "clip_mode", "warmup*", "scheduler*",
    "max_update", "max_epoch", "max_tokens*", "*batch_size*", "update_freq", "epochs", "num_epochs", "*seed", "fp16*", "bf16*",
    "amp", "data", "data_dir", "data_path*", "data_file*", "data_buffer_size", "data_seed", "data_set", "dataset*", "source_lang", "target_lang", "save_*", "log_*", "*_every", "num_workers",
    "distributed_*", "ddp_*", "patience", "keep_*", "restore_file", "reset_*", "resume*", "user_dir", "label_smoothing",
    "smoothing", "validate_*", "checkpoint_activations", "offload_activations", "results_dir", "output_dir", "vae", "wandb*",
    // Notes for people.
    "name", "description", "comment*", "notes", "version", "date", "author*",
];

/// Whether `key` belongs to another program.
pub(super) fn is_silent(key: &str) -> bool {
    SILENT.iter().any(|silent| pattern::matches(silent, key))
}

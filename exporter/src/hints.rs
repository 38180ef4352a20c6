//! What to do about an error, in the options of this command line: the libraries know nothing of them.

use moh_export::quantize::Problem as Unquantizable;
use moh_export::{Error, Versioned};
use moh_models::checkpoint::{Mismatch, Problem};
use moh_models::{Error as ModelError, Warning};
use moh_operators::{Definition, RoutedCachedAttention};
use std::collections::BTreeSet;
use std::io::ErrorKind;

/// The advice that goes with an error, if there is any.
pub(crate) fn hint(error: &anyhow::Error) -> Option<String> {
    match error.downcast_ref::<Error>() {
        Some(Error::Model(error)) => of_model(error),
        Some(error) => of_export(error),
        None => of_model(error.downcast_ref()?),
    }
}

fn of_export(error: &Error) -> Option<String> {
    Some(match error {
        Error::Exists { .. } => "--force replaces it".to_owned(),
        Error::FolderExists { .. } => "choose another folder".to_owned(),
        Error::Share { which, .. } => format!("choose it with --{which}"),
        Error::Routers { .. } => {
            "save the checkpoint as safetensors, without that name, or choose --router query-norm".to_owned()
        }
        Error::SideFile { .. } => "choose another folder, or replace it with --force".to_owned(),
        Error::ForeignSideFile { .. } => {
            "choose another folder: not even --force replaces files of another model".to_owned()
        }
        Error::OverwritesInput { .. } => "choose another output".to_owned(),
        Error::Library { .. } => "--with-library takes the file of libmoh_ops".to_owned(),
        Error::Io { reason, .. } => return of_system(reason.kind()),
        Error::Disagreement(_) => {
            "no model was written; if --dtype f32 does not help, please report this as a bug of moh-export".to_owned()
        }
        Error::VerifySize { .. } => "leave out --verify, or choose smaller sizes".to_owned(),
        Error::Differs(_) => {
            "no model was written; see in docs/configuration.md whether config.json has the settings of your \
                              PyTorch model, and whether that ran in float32 and after eval(); \
                              compare a quantised model without --quantize first; --reference-tolerance allows larger \
                              differences"
                .to_owned()
        }
        Error::Lengths { .. } => "choose smaller --sequence and --past".to_owned(),
        Error::Tokens { .. } => "choose another --tokens".to_owned(),
        Error::Inline { .. } => "leave out --weights inline".to_owned(),
        Error::Room { .. } => "nothing was written; choose a folder on another disk, or make room".to_owned(),
        Error::LinkFormat { .. } => "leave out --weights link".to_owned(),
        Error::LinkType { .. } => "choose that type with --dtype, or leave out --weights link".to_owned(),
        Error::Link { reason, .. } => of_link(reason.kind()).to_owned(),
        Error::Range { .. } => "export with --dtype f32".to_owned(),
        Error::Target { options: None, .. } => "choose another --for".to_owned(),
        Error::Target { options: Some(options), .. } => format!("leave out {options}, or choose another --for"),
        Error::Quantize(problem) => return of_quantization(problem),
        Error::Part { .. } => "leave out --part".to_owned(),
        // What it is called in `inspect`.
        Error::Dimension { name, .. } if name == "encoder_sequence" => "leave out --source".to_owned(),
        Error::Dimension { name, .. } => format!("leave out --{name}"),
        Error::PortableCache => "leave out --attention portable or --cache in-place".to_owned(),
        Error::AttentionType => "choose --attention-type bf16 or --attention portable".to_owned(),
        Error::AttentionKind { found: RoutedCachedAttention::NAME } => {
            "choose --cache concat, or leave out --attention-type bf16".to_owned()
        }
        Error::AttentionKind { .. } => "leave out --attention-type bf16".to_owned(),
        Error::Portable { option } => format!("leave out --attention portable or {option}"),
        Error::Version { what: Versioned::Opset, .. } => "choose it with --opset".to_owned(),
        Error::Version { what: Versioned::Ir, .. } => "choose it with --ir-version".to_owned(),
        _ => return None,
    })
}

fn of_quantization(problem: &Unquantizable) -> Option<String> {
    Some(match problem {
        Unquantizable::Block { tensor, fits, others, .. } => {
            let (patterns, them) = (patterns(tensor, others), if others.is_empty() { "it" } else { "them" });
            let keep = format!("--keep '{patterns}' leaves {them} in floating point");
            match fits.last() {
                Some(block) => format!("choose --block {block}, or {keep}"),
                None => keep,
            }
        }
        Unquantizable::BlockSize { .. } => "choose it with --block".to_owned(),
        Unquantizable::Type { .. } => "choose --dtype f32 or f16".to_owned(),
        Unquantizable::Opset { .. } => "choose --opset 21, --form nbits or --form moh".to_owned(),
        Unquantizable::Activations => "choose --form nbits, --form moh or --activations float".to_owned(),
        Unquantizable::Keep { .. } => {
            "the names are those of the checkpoint's tensors, with or without .weight".to_owned()
        }
        Unquantizable::Nothing | Unquantizable::NothingFits => "leave out --quantize".to_owned(),
        Unquantizable::NothingLeft => "leave out --quantize, or name fewer layers with --keep".to_owned(),
        Unquantizable::ReduceRange => "leave out --reduce-range, or choose --quantize int8".to_owned(),
    })
}

/// Patterns for `--keep` that name the layers of these tensors: one for the layers of a kind, whatever their numbers.
fn patterns(tensor: &str, others: &[String]) -> String {
    let layer = |tensor: &str| tensor.rsplit_once('.').map_or(tensor, |(layer, _)| layer).to_owned();
    if others.is_empty() {
        return layer(tensor);
    }
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let kind = |tensor: &str| {
        let layer = layer(tensor);
        layer.split('.').map(|part| if is_number(part) { "*" } else { part }).collect::<Vec<_>>().join(".")
    };
    let kinds: BTreeSet<String> = others.iter().map(String::as_str).chain([tensor]).map(kind).collect();
    kinds.into_iter().collect::<Vec<_>>().join(",")
}

fn of_link(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::CrossesDevices => {
            "both have to be on one file system: choose an output folder on the checkpoint's, or leave out --weights link (convert: --link)"
        }
        _ => "this file system or its permissions allow no hard link there: leave out --weights link (convert: --link)",
    }
}

fn of_system(kind: ErrorKind) -> Option<String> {
    let advice = match kind {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "the disk is full: as much room is needed as the model's weights take; nothing was left behind"
        }
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => "choose a folder that you may write to",
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
            "a file is where a folder is needed: choose another folder"
        }
        _ => return None,
    };
    Some(advice.to_owned())
}

fn of_model(error: &ModelError) -> Option<String> {
    Some(match error {
        ModelError::AmbiguousWeights { .. } => "choose one with --weights-key".to_owned(),
        ModelError::NoStateDict { keys, .. } | ModelError::WeightsKey { keys, .. } if !keys.is_empty() => {
            "choose one of them with --weights-key".to_owned()
        }
        ModelError::NoConfig { .. } => {
            "give the configuration with --config, or see with --preset how the weights differ from a preset's"
                .to_owned()
        }
        ModelError::UnknownFormat { file, .. } if file.extension().is_some_and(|extension| extension == "onnx") => {
            format!(
                "it is an exported model: name the checkpoint that it was exported from; `moh-run profile {}` shows the exported \
             model's parts",
                file.display()
            )
        }
        ModelError::AmbiguousPreset { .. } => "give --preset, or --config".to_owned(),
        ModelError::Family { .. } | ModelError::NoFamily { .. } => "choose it with --family".to_owned(),
        ModelError::WrongFamily { .. } => "the key \"family\" or --family chooses it".to_owned(),
        ModelError::AmbiguousPrefix { prefixes, .. } => {
            let one = prefixes.last().map_or("", String::as_str);
            format!("leave out all but one, with --ignore-unexpected '{one}*' for example")
        }
        ModelError::Tensors(mismatch) => return of_mismatch(mismatch),
        ModelError::Config { key, .. } if key == "model_type" => {
            "if it computes what a LLaMA does, say so in config.json: \"family\": \"llama\"".to_owned()
        }
        ModelError::Config { key, .. } if key == "part" => "choose it with --part".to_owned(),
        _ => return None,
    })
}

/// Tensors that are too many, and nothing else that is wrong, may be meant to be left out.
fn of_mismatch(mismatch: &Mismatch) -> Option<String> {
    let unexpected = |problem: &Problem| match problem {
        Problem::Unexpected { tensor, .. } => Some(tensor.clone()),
        _ => None,
    };
    let names: Option<Vec<String>> = mismatch.problems.iter().map(unexpected).collect();
    let first = names?.into_iter().next()?;
    let module = first.split_once('.').map_or(first.clone(), |(module, _)| format!("{module}.*"));
    Some(format!("if the model does not need them, leave them out with --ignore-unexpected '{module}'"))
}

/// The advice that goes with a warning, if there is any.
pub(crate) fn of_warning(warning: &Warning) -> Option<String> {
    match warning {
        Warning::OtherWeights { .. } => Some("choose with --weights-key".to_owned()),
        _ => None,
    }
}

//! What a session may ask of the operators.

use crate::api::{Api, call};
use crate::failure::Failure;
use crate::pages;
use moh_cpu::{PRECISION_VARIABLE, Precision};
use ort_sys::OrtSessionOptions;
use std::ffi::{CStr, CString};
use std::ptr::{self, NonNull};

/// The session's config entry, set before the library is registered, and the environment variable for hosts that can set no
/// entries: `1` packs constant weights when the session is made, `0` at every call. The default is [`PackWeights::OfFiles`]. The entry comes first.
/// Words that mean the same are accepted.
const PACK_WEIGHTS: (&CStr, &str) = (c"ai.moh.pack_weights", "MOH_PACK_WEIGHTS");

/// How exactly float32 is multiplied, a name of [`Precision::NAMES`]; likewise.
const PRECISION: (&CStr, &str) = (c"ai.moh.float32_matmul_precision", PRECISION_VARIABLE);

/// The entry that the library leaves in options that it is registered for: a second domain of the same name would be refused by the host
/// when it makes the session, in words ("Domain already set in registry") that name no library.
const REGISTERED: &CStr = c"ai.moh.registered";

/// Which constant weights are packed when the session is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PackWeights {
    Never,
    /// Of dense layers and projections, where onnxruntime has mapped them from a file: the copy takes the place of what was mapped.
    OfFiles,
    /// All that can be.
    Always,
}

/// What a session asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) pack_weights: PackWeights,
    /// How exactly float32 is multiplied.
    pub(crate) precision: Precision,
}

impl Settings {
    /// Reads a session's options.
    ///
    /// # Safety
    /// `options` are live options of the host.
    pub(crate) unsafe fn read(api: Api, options: NonNull<OrtSessionOptions>) -> Result<Settings, Failure> {
        // SAFETY: as promised.
        let (pack_weights, precision) =
            unsafe { (wanted(api, options, PACK_WEIGHTS)?, wanted(api, options, PRECISION)?) };
        let default = || if pages::can_tell() { PackWeights::OfFiles } else { PackWeights::Never };
        let pack_weights = match pack_weights {
            None => default(),
            Some((place, value)) if switch(&place, &value)? => PackWeights::Always,
            Some(_) => PackWeights::Never,
        };
        let precision = precision.map_or(Ok(Precision::default()), |(place, value)| {
            value.parse().map_err(|expected| Failure::Setting(format!("{place}: {expected}")))
        })?;
        Ok(Settings { pack_weights, precision })
    }

    fn text(self) -> CString {
        let pack_weights = match self.pack_weights {
            PackWeights::Never => "0",
            PackWeights::OfFiles => "default",
            PackWeights::Always => "1",
        };
        let text = format!("pack_weights={pack_weights}, float32_matmul_precision={}", self.precision.name());
        CString::new(text).unwrap_or_default()
    }

    /// Notes that the operators were registered for these options.
    ///
    /// # Safety
    /// `options` are live options of the host.
    pub(crate) unsafe fn note(self, api: Api, options: NonNull<OrtSessionOptions>) -> Result<(), Failure> {
        // SAFETY: the options are alive; both texts are terminated, and copied by the host.
        Ok(unsafe { call!(api, AddSessionConfigEntry(options.as_ptr(), REGISTERED.as_ptr(), self.text().as_ptr())) }?)
    }

    /// Whether the operators were registered for these options before, with the same settings.
    ///
    /// # Errors
    /// [`Failure::Setting`] for other settings than before.
    ///
    /// # Safety
    /// `options` are live options of the host.
    pub(crate) unsafe fn are_registered(self, api: Api, options: NonNull<OrtSessionOptions>) -> Result<bool, Failure> {
        // SAFETY: as promised.
        match unsafe { entry(api, options, REGISTERED)? } {
            None => Ok(false),
            Some(before) if before.as_bytes() == self.text().as_bytes() => Ok(true),
            Some(before) => Err(Failure::Setting(format!(
                "the ai.moh operators are registered for these session options already, with {before}: set {} and \
                 {} before libmoh_ops is registered, and register it once",
                PACK_WEIGHTS.0.to_string_lossy(),
                PRECISION.0.to_string_lossy()
            ))),
        }
    }
}

/// What the session's entry or, if there is none, the environment says, and where it says so.
///
/// # Safety
/// `options` are live options of the host.
unsafe fn wanted(
    api: Api,
    options: NonNull<OrtSessionOptions>,
    (key, variable): (&CStr, &str),
) -> Result<Option<(String, String)>, Failure> {
    // SAFETY: as promised.
    if let Some(value) = unsafe { entry(api, options, key)? } {
        return Ok(Some((format!("session config entry {}", key.to_string_lossy()), value)));
    }
    let value = std::env::var_os(variable).filter(|value| !value.is_empty());
    Ok(value.map(|value| (format!("environment variable {variable}"), value.to_string_lossy().into_owned())))
}

fn switch(what: &str, value: &str) -> Result<bool, Failure> {
    match value.to_ascii_lowercase().as_str() {
        "0" | "false" | "no" | "off" => Ok(false),
        "1" | "true" | "yes" | "on" => Ok(true),
        _ => Err(Failure::Setting(format!("{what}: expected 0 or 1, found {value:?}"))),
    }
}

/// A config entry's value, if there is one.
///
/// # Safety
/// `options` are live options of the host.
unsafe fn entry(api: Api, options: NonNull<OrtSessionOptions>, key: &CStr) -> Result<Option<String>, Failure> {
    let (options, key) = (options.as_ptr().cast_const(), key.as_ptr());
    let (mut found, mut size) = (0, 0);
    // SAFETY: the options are alive and the key is terminated; the host writes numbers to local variables, and, once it has said
    // how many, bytes to a buffer of that size.
    unsafe {
        call!(api, HasSessionConfigEntry(options, key, &raw mut found))?;
        if found == 0 {
            return Ok(None);
        }
        call!(api, GetSessionConfigEntry(options, key, ptr::null_mut(), &raw mut size))?;
        let mut value = vec![0u8; size];
        call!(api, GetSessionConfigEntry(options, key, value.as_mut_ptr().cast(), &raw mut size))?;
        let value = CStr::from_bytes_until_nul(&value).unwrap_or_default();
        Ok(Some(value.to_string_lossy().into_owned()))
    }
}

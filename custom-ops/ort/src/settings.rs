//! What a session may ask of the operators.

use crate::api::{Api, call};
use crate::failure::Failure;
use ort_sys::OrtSessionOptions;
use std::ffi::CStr;
use std::ptr::{self, NonNull};

/// The session's config entry, set before the library is registered, and the environment variable for hosts that can set no
/// entries: `1` packs constant weights when the session is made, `0` (the default) at every call. The entry comes first.
const PACK_WEIGHTS: (&CStr, &str) = (c"ai.moh.pack_weights", "MOH_PACK_WEIGHTS");

/// What a session asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Settings {
    /// Keep a packed copy of constant weights.
    pub(crate) pack_weights: bool,
}

impl Settings {
    /// Reads a session's options.
    ///
    /// # Safety
    /// `options` are live options of the host.
    pub(crate) unsafe fn read(api: Api, options: NonNull<OrtSessionOptions>) -> Result<Settings, Failure> {
        let (key, variable) = PACK_WEIGHTS;
        // SAFETY: as promised.
        let pack_weights = match unsafe { entry(api, options, key)? } {
            Some(value) => switch(&format!("session config entry {}", key.to_string_lossy()), &value)?,
            None => match std::env::var_os(variable).filter(|value| !value.is_empty()) {
                Some(value) => switch(&format!("environment variable {variable}"), &value.to_string_lossy())?,
                None => false,
            },
        };
        Ok(Settings { pack_weights })
    }
}

fn switch(what: &str, value: &str) -> Result<bool, Failure> {
    match value {
        "0" => Ok(false),
        "1" => Ok(true),
        found => Err(Failure::Host(format!("{what}: expected 0 or 1, found {found:?}"))),
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

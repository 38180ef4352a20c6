//! Registers the domain's name with the host before sessions are created on several threads.
//!
//! The first session with a custom domain adds the domain's name to a map of the process. onnxruntime (at least 1.17
//! to 1.31) checks whether the name is present and then adds it, without one lock around both (`CreateCustomRegistry`,
//! core/session/custom_ops.cc). If the first two sessions are created concurrently, as in a server that loads models
//! in parallel, one can fail with "Trying to add a domain to DomainToVersion map, but the domain is already exist".
//! Creating a session here, under the registry's lock, prevents this.

use crate::api::{Api, call};
use crate::failure::Failure;
use crate::objects::made;
use ort_sys::{OrtCustomOpDomain, OrtEnv, OrtLoggingLevel, OrtSession, OrtSessionOptions};
use std::ptr::{self, NonNull};

/// Bytes of a model with one node, `y = Identity(x)` for float x of shape (1): IR version 8, operator set 17.
const MODEL: &[u8] = b"\x08\x08\
    :7\
        \x0A\x10\x0A\x01x\x12\x01y\"\x08Identity\
        \x12\x01g\
        Z\x0F\x0A\x01x\x12\x0A\x0A\x08\x08\x01\x12\x04\x0A\x02\x08\x01\
        b\x0F\x0A\x01y\x12\x0A\x0A\x08\x08\x01\x12\x04\x0A\x02\x08\x01\
    B\x02\x10\x11";

/// Creates a session with the domain and drops it.
///
/// After an error, sessions still work, unless the first two are created concurrently.
pub(crate) fn announce(api: Api, domain: NonNull<OrtCustomOpDomain>) -> Result<(), Failure> {
    let mut made_here = Objects { api, env: ptr::null_mut(), options: ptr::null_mut(), session: ptr::null_mut() };
    let Objects { env, options, session, .. } = &mut made_here;
    // SAFETY: the host writes new objects to local variables, which are dropped after their last use. The name is
    // NUL-terminated, the model has the passed length, and the domain is never freed. A process has one
    // reference-counted environment: if none exists yet, this one is freed with the session. The session uses the
    // caller's thread only, so no thread is started.
    unsafe {
        call!(api, CreateEnv(OrtLoggingLevel::ORT_LOGGING_LEVEL_ERROR, c"ai.moh".as_ptr(), env))?;
        call!(api, CreateSessionOptions(options))?;
        call!(api, SetIntraOpNumThreads(*options, 1))?;
        call!(api, AddCustomOpDomain(*options, domain.as_ptr()))?;
        call!(api, CreateSessionFromArray(*env, MODEL.as_ptr().cast(), MODEL.len(), *options, session))?;
    }
    made(*session, "session").map(drop)
}

/// Objects created by the host so far.
struct Objects {
    api: Api,
    env: *mut OrtEnv,
    options: *mut OrtSessionOptions,
    session: *mut OrtSession,
}

impl Drop for Objects {
    fn drop(&mut self) {
        let api = self.api.as_ptr();
        // SAFETY: owned by self and released once, the session before its environment; releasing null does nothing.
        unsafe {
            ((*api).ReleaseSession)(self.session);
            ((*api).ReleaseSessionOptions)(self.options);
            ((*api).ReleaseEnv)(self.env);
        }
    }
}

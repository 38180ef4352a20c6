//! Makes the domain's name known to the host before sessions are made on several threads.
//!
//! The first session with a custom domain adds the domain's name to a map of the process: onnxruntime (1.17 to 1.31 at least) looks
//! whether the name is there, and then adds it, with no lock over both (`CreateCustomRegistry`, core/session/custom_ops.cc). Two first
//! sessions at the same time can therefore fail with "Trying to add a domain to DomainToVersion map, but the domain is already
//! exist", as when a server loads its models in parallel. A session made here, under the registry's lock, comes first.

use crate::api::{Api, call};
use crate::failure::Failure;
use crate::objects::made;
use ort_sys::{OrtCustomOpDomain, OrtEnv, OrtLoggingLevel, OrtSession, OrtSessionOptions};
use std::ptr::{self, NonNull};

/// A model of one node, `y = Identity(x)` for x of type float and shape (1), as its file's bytes: IR 8, operator set 17.
const MODEL: &[u8] = b"\x08\x08\
    :7\
        \x0A\x10\x0A\x01x\x12\x01y\"\x08Identity\
        \x12\x01g\
        Z\x0F\x0A\x01x\x12\x0A\x0A\x08\x08\x01\x12\x04\x0A\x02\x08\x01\
        b\x0F\x0A\x01y\x12\x0A\x0A\x08\x08\x01\x12\x04\x0A\x02\x08\x01\
    B\x02\x10\x11";

/// Makes a session that knows the domain, and drops it.
///
/// An error leaves everything as it was: sessions can be made, if not the first two at once.
pub(crate) fn announce(api: Api, domain: NonNull<OrtCustomOpDomain>) -> Result<(), Failure> {
    let mut made_here = Objects { api, env: ptr::null_mut(), options: ptr::null_mut(), session: ptr::null_mut() };
    let Objects { env, options, session, .. } = &mut made_here;
    // SAFETY: the host writes new objects to local variables, which are dropped after their last use; the name is terminated, the
    // model as long as said; the domain is alive for good. A process has one environment, which is counted: if there is none yet,
    // this one goes with the session. One thread is the caller's: no thread is started.
    unsafe {
        call!(api, CreateEnv(OrtLoggingLevel::ORT_LOGGING_LEVEL_ERROR, c"ai.moh".as_ptr(), env))?;
        call!(api, CreateSessionOptions(options))?;
        call!(api, SetIntraOpNumThreads(*options, 1))?;
        call!(api, AddCustomOpDomain(*options, domain.as_ptr()))?;
        call!(api, CreateSessionFromArray(*env, MODEL.as_ptr().cast(), MODEL.len(), *options, session))?;
    }
    made(*session, "session").map(drop)
}

/// What the host has made so far.
struct Objects {
    api: Api,
    env: *mut OrtEnv,
    options: *mut OrtSessionOptions,
    session: *mut OrtSession,
}

impl Drop for Objects {
    fn drop(&mut self) {
        let api = self.api.as_ptr();
        // SAFETY: owned by self, and released once, the session before its environment; null is released as nothing.
        unsafe {
            ((*api).ReleaseSession)(self.session);
            ((*api).ReleaseSessionOptions)(self.options);
            ((*api).ReleaseEnv)(self.env);
        }
    }
}

//! Domains, session options and sessions.

use super::*;

pub(super) unsafe extern "system" fn create_domain(
    name: *const c_char,
    out: *mut *mut OrtCustomOpDomain,
) -> OrtStatusPtr {
    let domain = Domain { name: unsafe { CStr::from_ptr(name) }.to_owned(), ops: Vec::new(), sessions: 0 };
    unsafe { out.write(Box::into_raw(Box::new(domain)).cast()) };
    ok()
}

pub(super) unsafe extern "system" fn add_op(domain: *mut OrtCustomOpDomain, op: *const OrtCustomOp) -> OrtStatusPtr {
    unsafe { (*domain.cast::<Domain>()).ops.push(op) };
    ok()
}

pub(super) unsafe extern "system" fn add_domain(
    options: *mut OrtSessionOptions,
    domain: *mut OrtCustomOpDomain,
) -> OrtStatusPtr {
    unsafe { (*options.cast::<Options>()).domains.push(domain.cast()) };
    ok()
}

pub(super) unsafe extern "system" fn create_env(
    _: OrtLoggingLevel,
    name: *const c_char,
    out: *mut *mut OrtEnv,
) -> OrtStatusPtr {
    unsafe { out.write(give(CStr::from_ptr(name).to_bytes().len() as u64)) };
    ok()
}

pub(super) unsafe fn find_entry<'a>(options: *const OrtSessionOptions, key: *const c_char) -> Option<&'a CString> {
    let (options, key) = unsafe { (&*options.cast::<Options>(), CStr::from_ptr(key)) };
    options.entries.iter().find(|(k, _)| k.as_c_str() == key).map(|(_, value)| value)
}

pub(super) unsafe extern "system" fn has_entry(
    options: *const OrtSessionOptions,
    key: *const c_char,
    out: *mut i32,
) -> OrtStatusPtr {
    unsafe { out.write(i32::from(find_entry(options, key).is_some())) };
    ok()
}

pub(super) unsafe extern "system" fn set_entry(
    options: *mut OrtSessionOptions,
    key: *const c_char,
    value: *const c_char,
) -> OrtStatusPtr {
    let entry = unsafe { (CStr::from_ptr(key).to_owned(), CStr::from_ptr(value).to_owned()) };
    unsafe { (*options.cast::<Options>()).entries.push(entry) };
    ok()
}

pub(super) unsafe extern "system" fn get_entry(
    options: *const OrtSessionOptions,
    key: *const c_char,
    value: *mut c_char,
    size: *mut usize,
) -> OrtStatusPtr {
    let Some(found) = (unsafe { find_entry(options, key) }) else { return fail("no such entry") };
    let bytes = found.as_bytes_with_nul();
    unsafe {
        match value.is_null() {
            true => size.write(bytes.len()),
            false if size.read() < bytes.len() => return fail("the buffer is too small"),
            false => value.copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len()),
        }
    }
    ok()
}

pub(super) unsafe extern "system" fn create_options(out: *mut *mut OrtSessionOptions) -> OrtStatusPtr {
    unsafe { out.write(give(Options::default())) };
    ok()
}

pub(super) unsafe extern "system" fn set_threads(_: *mut OrtSessionOptions, threads: i32) -> OrtStatusPtr {
    if threads == 1 { ok() } else { fail("more threads than the caller's") }
}

pub(super) unsafe extern "system" fn create_session(
    _: *const OrtEnv,
    model: *const c_void,
    bytes: usize,
    options: *const OrtSessionOptions,
    out: *mut *mut OrtSession,
) -> OrtStatusPtr {
    assert!(!model.is_null() && bytes > 0);
    for &domain in unsafe { &(*options.cast::<Options>()).domains } {
        unsafe { (*domain).sessions += 1 };
    }
    unsafe { out.write(give(bytes)) };
    ok()
}

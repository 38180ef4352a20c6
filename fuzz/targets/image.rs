//! A picture: decoded, and made smaller.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moh_fuzz::folder;
use moh_tasks::image::Picture;

fuzz_target!(|bytes: &[u8]| {
    let Ok((picture, _)) = Picture::open_told(&folder().put("picture", bytes)) else { return };
    assert_eq!(picture.samples().len(), picture.width() * picture.height() * picture.channels());
    let _ = picture.cropped(7, 300);
    let _ = picture.to_gray();
});

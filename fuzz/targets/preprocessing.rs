//! A `preprocessor_config.json`, and a picture that is prepared as it says.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moh_fuzz::folder;
use moh_tasks::classify::Preprocessing;
use moh_tasks::image::Picture;

fuzz_target!(|bytes: &[u8]| {
    folder().put("preprocessor_config.json", bytes);
    let Ok(preprocessing) = Preprocessing::from_folder(folder().path(), 3, 8) else { return };
    for (width, height) in [(5, 7), (1, 60), (8, 8)] {
        let samples = (0..width * height * 3).map(|i| i as u8).collect();
        let seen = preprocessing.seen(&Picture::new(width, height, 3, samples).unwrap());
        assert_eq!((seen.width(), seen.height()), (8, 8));
    }
});

//! Estimates the tokens of an image, from the size in the image's own head.
//!
//! Providers charge images in three ways: by pixels (Anthropic), by tiles of a fixed size (OpenAI),
//! and by tiles whose size depends on the shorter side (Google). The provider is unknown here, so
//! the most expensive of the three counts.

/// Returns the tokens of an image that begins with these bytes. Returns `None` if the bytes state
/// no possible size.
pub(super) fn image_tokens(bytes: &mut impl Iterator<Item = u8>) -> Option<u64> {
    let (width, height) = image_size(&mut ImageHeadBytes(bytes))?;
    let is_possible = |side: u32| (1..=MAX_SIDE_PIXELS).contains(&side);
    if !is_possible(width) || !is_possible(height) {
        return None;
    }
    let dearest = tokens_by_pixels(width, height).max(tokens_by_fixed_tiles(width, height));
    Some(dearest.max(tokens_by_scaled_tiles(width, height)).min(MAX_IMAGE_TOKENS))
}

/// Returns the tokens by Anthropic's rule: 750 pixels to a token.
fn tokens_by_pixels(width: u32, height: u32) -> u64 {
    (u64::from(width) * u64::from(height)).div_ceil(750)
}

/// Returns the tokens by OpenAI's rule: the image is scaled to fit into 2,048 pixels, and each tile
/// of 512 pixels costs 170 tokens. The image itself costs 85 more.
fn tokens_by_fixed_tiles(width: u32, height: u32) -> u64 {
    let (width, height) = scale_to_square(width, height, 2048);
    let tiles = |side: u32| u64::from(side.div_ceil(512));
    85 + 170 * tiles(width) * tiles(height)
}

/// Returns the tokens by Google's rule: the image is scaled to fit into 3,072 pixels, and each tile
/// costs 258 tokens. A tile's side is two thirds of the shorter side, within bounds.
fn tokens_by_scaled_tiles(width: u32, height: u32) -> u64 {
    // Google charges a small image as one tile.
    if width.max(height) <= 384 {
        return 258;
    }
    let (width, height) = scale_to_square(width, height, 3072);
    let tile = (width.min(height) * 2 / 3).clamp(256, 768);
    let tiles = |side: u32| u64::from(side.div_ceil(tile));
    258 * tiles(width) * tiles(height)
}

/// Returns the size of an image that is scaled down to fit into a square.
fn scale_to_square(width: u32, height: u32, square: u32) -> (u32, u32) {
    let longest = width.max(height);
    if longest <= square {
        return (width, height);
    }
    let side = |side: u32| {
        let side = u64::from(side) * u64::from(square) / u64::from(longest);
        u32::try_from(side).unwrap_or(square).max(1)
    };
    (side(width), side(height))
}

/// Returns width and height from the head of a PNG, JPEG, GIF or WebP.
fn image_size<I: Iterator<Item = u8>>(head: &mut ImageHeadBytes<'_, I>) -> Option<(u32, u32)> {
    match head.read_array()? {
        [0x89, b'P', b'N', b'G'] => {
            // A PNG begins with 8 signature bytes, 4 of which are read. The length of the first
            // chunk follows.
            head.skip_bytes(8)?;
            let is_head = head.read_array()? == *b"IHDR";
            let size = (head.read_u32_be()?, head.read_u32_be()?);
            is_head.then_some(size)
        }
        [0xff, 0xd8, 0xff, marker] => jpeg_size(head, marker),
        [b'G', b'I', b'F', b'8'] => gif_size(head),
        [b'R', b'I', b'F', b'F'] => webp_size(head),
        _ => None,
    }
}

/// Returns the size of a JPEG. The function skips segments by their stated length up to the frame
/// header.
fn jpeg_size<I: Iterator<Item = u8>>(
    head: &mut ImageHeadBytes<'_, I>,
    mut marker: u8,
) -> Option<(u32, u32)> {
    loop {
        match marker {
            // A start-of-frame marker of any compression. 0xc4, 0xc8 and 0xcc are tables or
            // reserved.
            0xc0..=0xcf if !matches!(marker, 0xc4 | 0xc8 | 0xcc) => {
                // Skipped: the segment's length and the bits per sample.
                head.skip_bytes(3)?;
                let (height, width) = (head.read_u16_be()?, head.read_u16_be()?);
                return Some((width.into(), height.into()));
            }
            // Fill bytes before a marker are allowed.
            0xff => (),
            // These markers have no length, or begin the data. A frame header comes before the data
            // in every valid image.
            0x00..=0x01 | 0xd0..=0xda => return None,
            _ => {
                // The stated length includes its own two bytes.
                let length = head.read_u16_be()?;
                head.skip_bytes(usize::from(length.checked_sub(2)?))?;
                if head.read_array::<1>()? != [0xff] {
                    return None;
                }
            }
        }
        [marker] = head.read_array()?;
    }
}

/// Returns the size of a GIF: the screen, or the first picture if that is larger.
fn gif_size<I: Iterator<Item = u8>>(head: &mut ImageHeadBytes<'_, I>) -> Option<(u32, u32)> {
    head.skip_bytes(2)?;
    let screen = (head.read_u16_le()?, head.read_u16_le()?);
    let [flags, _, _] = head.read_array()?;
    // The flag announces a global colour table of 3 bytes per entry, with 2^(n+1) entries.
    if flags & 0x80 != 0 {
        head.skip_bytes(3 << ((flags & 7) + 1))?;
    }
    loop {
        // Blocks before the first picture are extensions: a label, then sub-blocks up to an empty
        // one.
        match head.read_array()? {
            [b'!'] => {
                head.skip_bytes(1)?;
                while let [length] = head.read_array()?
                    && length > 0
                {
                    head.skip_bytes(length.into())?;
                }
            }
            [b','] => {
                let (left, top) = (head.read_u16_le()?, head.read_u16_le()?);
                let (width, height) = (head.read_u16_le()?, head.read_u16_le()?);
                let side = |start: u16, side: u16, screen: u16| {
                    (u32::from(start) + u32::from(side)).max(screen.into())
                };
                return Some((side(left, width, screen.0), side(top, height, screen.1)));
            }
            _ => return None,
        }
    }
}

/// Returns the size of a WebP in one of its three formats.
fn webp_size<I: Iterator<Item = u8>>(head: &mut ImageHeadBytes<'_, I>) -> Option<(u32, u32)> {
    head.skip_bytes(4)?;
    if head.read_array()? != *b"WEBP" {
        return None;
    }
    match head.read_array()? {
        // The extended format: the size is stored as two 24-bit numbers, each less one.
        [b'V', b'P', b'8', b'X'] => {
            head.skip_bytes(8)?;
            let mut side = || {
                let [a, b, c] = head.read_array()?;
                Some(u32::from_le_bytes([a, b, c, 0]) + 1)
            };
            Some((side()?, side()?))
        }
        // The lossless format: a signature byte, then two 14-bit numbers, each less one.
        [b'V', b'P', b'8', b'L'] => {
            head.skip_bytes(4)?;
            let is_head = head.read_array()? == [0x2f];
            let bits = u32::from_le_bytes(head.read_array()?);
            is_head.then_some(((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1))
        }
        // The lossy format: the frame's start code, then two 14-bit numbers below two scaling bits.
        [b'V', b'P', b'8', b' '] => {
            head.skip_bytes(7)?;
            let is_head = head.read_array()? == [0x9d, 0x01, 0x2a];
            let pixels = |side: u16| u32::from(side & 0x3fff);
            let size = (pixels(head.read_u16_le()?), pixels(head.read_u16_le()?));
            is_head.then_some(size)
        }
        _ => None,
    }
}

/// A reader of an image's head. Every read returns `None` if the bytes end too early.
struct ImageHeadBytes<'a, I>(&'a mut I);

impl<I: Iterator<Item = u8>> ImageHeadBytes<'_, I> {
    fn read_array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        for byte in &mut bytes {
            *byte = self.0.next()?;
        }
        Some(bytes)
    }

    fn skip_bytes(&mut self, count: usize) -> Option<()> {
        count.checked_sub(1).map_or(Some(()), |last| self.0.nth(last).map(drop))
    }

    fn read_u32_be(&mut self) -> Option<u32> {
        self.read_array().map(u32::from_be_bytes)
    }

    fn read_u16_be(&mut self) -> Option<u16> {
        self.read_array().map(u16::from_be_bytes)
    }

    fn read_u16_le(&mut self) -> Option<u16> {
        self.read_array().map(u16::from_le_bytes)
    }
}

/// The maximum side of a possible image, in pixels. No provider's image has a longer side, and
/// WebP's 14-bit sizes end here.
const MAX_SIDE_PIXELS: u32 = 1 << 14;

/// The maximum number of tokens of an image. Providers scale larger images down, and Google's
/// largest has 24 tiles.
pub(super) const MAX_IMAGE_TOKENS: u64 = 24 * 258;

/// The maximum length of a head's text, in bytes. A JPEG may have a preview and colour profiles
/// before its size.
pub(super) const MAX_HEAD_BYTES: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{MAX_IMAGE_TOKENS, image_tokens};

    fn of(bytes: &[u8]) -> Option<u64> {
        image_tokens(&mut bytes.iter().copied())
    }

    fn png(width: u32, height: u32) -> Vec<u8> {
        let head = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".as_slice();
        [head, &width.to_be_bytes(), &height.to_be_bytes(), &[8, 6, 0, 0, 0]].concat()
    }

    fn jpeg(width: u16, height: u16, before: &[u8]) -> Vec<u8> {
        let picture =
            [&[0xff, 0xc2, 0, 17, 8][..], &height.to_be_bytes(), &width.to_be_bytes()].concat();
        [&[0xff, 0xd8][..], before, &picture].concat()
    }

    fn segment(marker: u8, content: &[u8]) -> Vec<u8> {
        let length = u16::try_from(content.len() + 2).unwrap();
        [&[0xff, marker][..], &length.to_be_bytes(), content].concat()
    }

    fn gif(screen: (u16, u16), at: (u16, u16), picture: (u16, u16)) -> Vec<u8> {
        let two = |(x, y): (u16, u16)| [x.to_le_bytes(), y.to_le_bytes()].concat();
        let extension = [&[b'!', 0xf9, 4][..], &[0; 4], &[0]].concat();
        [
            b"GIF89a",
            &*two(screen),
            &[0x80, 0, 0],
            &[0; 6],
            &extension,
            b",",
            &two(at),
            &two(picture),
        ]
        .concat()
    }

    fn webp(kind: [u8; 4], rest: &[u8]) -> Vec<u8> {
        [b"RIFF\x64\0\0\0WEBP".as_slice(), &kind, &[0; 4], rest].concat()
    }

    fn webps(width: u32, height: u32) -> [Vec<u8>; 3] {
        let three = |side: u32| (side - 1).to_le_bytes()[..3].to_vec();
        let two = |side: u32| side.to_le_bytes()[..2].to_vec();
        let bits = (width - 1) | (height - 1) << 14;
        [
            webp(*b"VP8X", &[&[0; 4], &*three(width), &three(height)].concat()),
            webp(*b"VP8L", &[&[0x2f][..], &bits.to_le_bytes()].concat()),
            webp(*b"VP8 ", &[&[0, 0, 0, 0x9d, 0x01, 0x2a][..], &two(width), &two(height)].concat()),
        ]
    }

    /// G9: an image costs the most expensive of three rules.
    #[test]
    fn an_image_costs_what_its_size_does() {
        for ((width, height), expected) in [
            ((1, 1), 258),
            ((384, 384), 258),
            ((385, 385), 4 * 258),
            ((512, 512), 4 * 258),
            ((960, 540), 6 * 258),
            ((2048, 768), 2098),
            ((1568, 1568), 3279),
            ((3000, 2000), MAX_IMAGE_TOKENS),
            ((16_000, 1), 12 * 258),
            ((16_384, 2000), 24 * 258),
        ] {
            assert_eq!(of(&png(width, height)), Some(expected), "{width} x {height}");
        }
    }

    /// G9: an impossible or incomplete size is no size.
    #[test]
    fn a_head_that_lies_or_ends_says_nothing() {
        for (width, height) in [(0, 1), (1, 0), (1 << 31, 1), (u32::MAX, u32::MAX), (1, 16_385)] {
            assert_eq!(of(&png(width, height)), None, "{width} x {height}");
        }
        let late = jpeg(100, 100, &segment(0xda, &[]));
        let short = jpeg(100, 100, &[0xff, 0xe0, 0, 1]);
        let broken = jpeg(100, 100, &[&*segment(0xe0, &[1]), &[0]].concat());
        for odd in [late, short, broken, b"%PDF-1.7".to_vec(), webp(*b"ANIM", &[0; 20]), vec![]] {
            assert_eq!(of(&odd), None, "{odd:?}");
        }
        // The picture extends beyond the screen, so the picture's far corner counts.
        assert_eq!(of(&gif((1, 1), (500, 0), (1500, 2000))), of(&png(2000, 2000)));
    }

    proptest! {
        /// G9: every format gives the same size, at any position in a JPEG. A truncated head gives none.
        #[test]
        fn every_form_says_its_size(width in 1_u16..=16_383, height in 1_u16..=16_383, segments in prop::collection::vec((0xe0_u8..=0xef, prop::collection::vec(any::<u8>(), 0..300)), 0..5)) {
            let (wide, high) = (u32::from(width), u32::from(height));
            let expected = of(&png(wide, high));
            prop_assert!(expected.is_some_and(|tokens| (258..=MAX_IMAGE_TOKENS).contains(&tokens)));
            let before: Vec<u8> = segments.iter().flat_map(|(marker, content)| segment(*marker, content)).collect();
            let forms = [jpeg(width, height, &before), gif((width, height), (0, 0), (1, 1))];
            for form in forms.into_iter().chain(webps(wide, high)) {
                prop_assert_eq!(of(&form), expected);
                for end in 0..form.len().min(24) {
                    prop_assert_eq!(of(&form[..end]), None);
                }
            }
        }

        /// G9: the tokens of any bytes stay between the minimum and the maximum.
        #[test]
        fn any_bytes_are_within_bounds(start in 0_usize..5, rest in prop::collection::vec(any::<u8>(), 0..200)) {
            let starts: [&[u8]; 5] = [b"", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\xff\xd8\xff", b"GIF89a", b"RIFF\0\0\0\0WEBP"];
            let tokens = of(&[starts[start], &rest].concat());
            prop_assert!(tokens.is_none_or(|tokens| (255..=MAX_IMAGE_TOKENS).contains(&tokens)));
        }
    }
}

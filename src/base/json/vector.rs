//! Finds the bytes of a string that are not plain text. On x86-64 it compares 16 or 32 bytes at a time.
//!
//! Each search has implementations with the same result. One uses SSE2, which every x86-64 processor has, and one for
//! long texts uses AVX2, which nearly every processor has. Another works byte by byte, for texts shorter than a vector
//! and for other processors. A test compares them.

/// Returns the offset of the first byte that is not plain text: a quote, a backslash, a control character, or a byte
/// outside ASCII.
#[inline]
pub(super) fn find_stop(data: &[u8]) -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    if data.len() >= BLOCK_BYTES {
        return search_blocks(data, stops);
    }
    data.iter().position(|byte| is_stop_byte(*byte))
}

/// Returns a mask with a bit for each byte that is not plain text. The lowest bit is the first byte's.
#[inline]
pub(super) fn stop_mask(bytes: &[u8; MASKED]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    return mask_of(bytes, stops);
    #[cfg(not(target_arch = "x86_64"))]
    bytes.iter().rev().fold(0, |mask, byte| mask << 1 | u64::from(is_stop_byte(*byte)))
}

/// Returns the result of [`stop_mask`], by AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn stop_mask_avx2(bytes: &[u8; MASKED]) -> u64 {
    let (blocks, _) = bytes.as_chunks();
    blocks.iter().rev().fold(0, |mask, block| mask << 32 | u64::from(avx2::stops(block)))
}

/// Returns a mask with a bit for each quote and backslash. The lowest bit is the first byte's.
#[inline]
pub(super) fn quote_mask(bytes: &[u8; MASKED]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    return mask_of(bytes, quotes);
    #[cfg(not(target_arch = "x86_64"))]
    bytes.iter().rev().fold(0, |mask, byte| mask << 1 | u64::from(is_quote_or_backslash(*byte)))
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn mask_of(bytes: &[u8; MASKED], search: impl Fn(&[u8; BLOCK_BYTES]) -> u32) -> u64 {
    let (blocks, _) = bytes.as_chunks();
    blocks.iter().rev().fold(0, |mask, block| mask << BLOCK_BYTES | u64::from(search(block)))
}

/// Returns the offset of the first quote or backslash.
#[inline]
pub(super) fn find_quote(data: &[u8]) -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    if data.len() >= BLOCK_BYTES {
        return search_blocks(data, quotes);
    }
    data.iter().position(|byte| is_quote_or_backslash(*byte))
}

/// Returns the offset of the first byte that is not plain text among the first [`SHORT`] bytes. Returns `None` if there
/// is none, or if `data` is shorter.
#[inline]
pub(super) fn find_near_stop(data: &[u8]) -> Option<usize> {
    let block: &[u8; SHORT] = data.first_chunk()?;
    #[cfg(target_arch = "x86_64")]
    return first_of(stops(block));
    #[cfg(not(target_arch = "x86_64"))]
    block.iter().position(|byte| is_stop_byte(*byte))
}

/// Returns the offset of the first quote or backslash among the first [`SHORT`] bytes. Returns `None` if there is none,
/// or if `data` is shorter.
#[inline]
pub(super) fn find_near_quote(data: &[u8]) -> Option<usize> {
    let block: &[u8; SHORT] = data.first_chunk()?;
    #[cfg(target_arch = "x86_64")]
    return first_of(quotes(block));
    #[cfg(not(target_arch = "x86_64"))]
    block.iter().position(|byte| is_quote_or_backslash(*byte))
}

/// Returns the place of the lowest bit.
#[cfg(target_arch = "x86_64")]
#[inline]
fn first_of(mask: u32) -> Option<usize> {
    (mask != 0).then(|| mask.trailing_zeros() as usize)
}

#[inline]
fn is_stop_byte(byte: u8) -> bool {
    matches!(byte, 0..b' ' | b'"' | b'\\' | 0x80..)
}

#[inline]
fn is_quote_or_backslash(byte: u8) -> bool {
    matches!(byte, b'"' | b'\\')
}

/// Searches block by block. The last block overlaps the block before it. Returns `None` if `data` is shorter than a
/// block.
#[cfg(target_arch = "x86_64")]
#[inline]
fn search_blocks(data: &[u8], search: impl Fn(&[u8; BLOCK_BYTES]) -> u32) -> Option<usize> {
    let last = data.last_chunk()?;
    let (blocks, _) = data.as_chunks();
    for (index, block) in blocks.iter().enumerate() {
        let found = search(block);
        if found != 0 {
            return Some(index * BLOCK_BYTES + found.trailing_zeros() as usize);
        }
    }
    let found = search(last);
    (found != 0).then(|| data.len() - BLOCK_BYTES + found.trailing_zeros() as usize)
}

/// Returns a mask with a bit for each byte that is not plain text.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "the compiler asks for it wherever a processor's extension is used")]
#[inline]
fn stops(block: &[u8; BLOCK_BYTES]) -> u32 {
    // SAFETY: SSE2 is a part of x86-64.
    unsafe { sse2::stops(block) }
}

/// Returns a mask with a bit for each quote and backslash.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "the compiler asks for it wherever a processor's extension is used")]
#[inline]
fn quotes(block: &[u8; BLOCK_BYTES]) -> u32 {
    // SAFETY: SSE2 is a part of x86-64.
    unsafe { sse2::quotes(block) }
}

#[cfg(target_arch = "x86_64")]
mod sse2 {
    use std::arch::x86_64::{
        __m128i, _mm_cmpeq_epi8, _mm_cmpgt_epi8, _mm_movemask_epi8, _mm_or_si128, _mm_set_epi64x,
        _mm_set1_epi8, _mm_xor_si128,
    };

    use super::BLOCK_BYTES;

    #[target_feature(enable = "sse2")]
    #[inline]
    pub(super) fn stops(block: &[u8; BLOCK_BYTES]) -> u32 {
        let bytes = load_block(block);
        // One comparison finds control characters, quotes and bytes outside ASCII. The flipped bit makes a blank of a
        // quote, moves the blank and `!` above it, and keeps the control characters below it. The comparison is signed:
        // bytes outside ASCII are negative.
        let flipped = _mm_xor_si128(bytes, broadcast_byte(b'"' ^ b' '));
        let low = _mm_cmpgt_epi8(broadcast_byte(b' ' + 1), flipped);
        lane_mask(_mm_or_si128(low, _mm_cmpeq_epi8(bytes, broadcast_byte(b'\\'))))
    }

    #[target_feature(enable = "sse2")]
    #[inline]
    pub(super) fn quotes(block: &[u8; BLOCK_BYTES]) -> u32 {
        let bytes = load_block(block);
        lane_mask(_mm_or_si128(
            _mm_cmpeq_epi8(bytes, broadcast_byte(b'"')),
            _mm_cmpeq_epi8(bytes, broadcast_byte(b'\\')),
        ))
    }

    #[target_feature(enable = "sse2")]
    #[inline]
    fn broadcast_byte(byte: u8) -> __m128i {
        _mm_set1_epi8(byte.cast_signed())
    }

    #[target_feature(enable = "sse2")]
    #[inline]
    fn lane_mask(bytes: __m128i) -> u32 {
        _mm_movemask_epi8(bytes).cast_unsigned()
    }

    /// Loads the block as two words, which the compiler turns into one vector load.
    #[target_feature(enable = "sse2")]
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the other half is the other word")]
    fn load_block(block: &[u8; BLOCK_BYTES]) -> __m128i {
        let block = u128::from_le_bytes(*block);
        let word = |word: u128| (word as u64).cast_signed();
        _mm_set_epi64x(word(block >> 64), word(block))
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{
        __m256i, _mm256_cmpeq_epi8, _mm256_cmpgt_epi8, _mm256_movemask_epi8, _mm256_or_si256,
        _mm256_set_epi64x, _mm256_set1_epi8, _mm256_xor_si256,
    };

    /// Compares like [`super::sse2::stops`].
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(super) fn stops(block: &[u8; 32]) -> u32 {
        let bytes = load_block(block);
        let flipped = _mm256_xor_si256(bytes, broadcast_byte(b'"' ^ b' '));
        let low = _mm256_cmpgt_epi8(broadcast_byte(b' ' + 1), flipped);
        let stops = _mm256_or_si256(low, _mm256_cmpeq_epi8(bytes, broadcast_byte(b'\\')));
        _mm256_movemask_epi8(stops).cast_unsigned()
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn broadcast_byte(byte: u8) -> __m256i {
        _mm256_set1_epi8(byte.cast_signed())
    }

    /// Loads the block as four words, which the compiler turns into one vector load.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn load_block(block: &[u8; 32]) -> __m256i {
        let (words, _) = block.as_chunks();
        let word = |at: usize| u64::from_le_bytes(words[at]).cast_signed();
        _mm256_set_epi64x(word(3), word(2), word(1), word(0))
    }
}

/// The number of bytes that are searched together in long strings: one bit of a `u64` for each.
pub(super) const MASKED: usize = 64;

/// The number of bytes that are searched first, before the longer blocks. Our choice: most strings are shorter.
const SHORT: usize = 16;

/// The number of bytes in an SSE2 vector.
#[cfg(target_arch = "x86_64")]
const BLOCK_BYTES: usize = 16;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        SHORT, find_near_quote, find_near_stop, find_quote, find_stop, is_quote_or_backslash,
        is_stop_byte, quote_mask, stop_mask,
    };

    proptest! {
        #[test]
        fn vectors_find_what_a_search_byte_by_byte_finds(
            mut data in prop::collection::vec(b' '..=b'~', 0..200),
            odd in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            from in 0_usize..20,
        ) {
            data.iter_mut().filter(|byte| is_stop_byte(**byte)).for_each(|byte| *byte = b'x');
            for (at, byte) in odd {
                if !data.is_empty() {
                    let at = at.index(data.len());
                    data[at] = byte;
                }
            }
            // The test covers unaligned data, too.
            let data = &data[from.min(data.len())..];
            prop_assert_eq!(find_stop(data), data.iter().position(|byte| is_stop_byte(*byte)));
            prop_assert_eq!(find_quote(data), data.iter().position(|byte| is_quote_or_backslash(*byte)));
            let (stop, quote) = (find_stop(data), find_quote(data));
            let near = |found: Option<usize>| found.filter(|at| data.len() >= SHORT && *at < SHORT);
            prop_assert_eq!(find_near_stop(data), near(stop));
            prop_assert_eq!(find_near_quote(data), near(quote));
            if let Some(block) = data.first_chunk() {
                let mask = stop_mask(block);
                for (at, byte) in block.iter().enumerate() {
                    prop_assert_eq!(mask >> at & 1 == 1, is_stop_byte(*byte));
                    prop_assert_eq!(quote_mask(block) >> at & 1 == 1, is_quote_or_backslash(*byte));
                }
                #[cfg(target_arch = "x86_64")]
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has AVX2.
                    #[expect(unsafe_code, reason = "the compiler asks for it wherever a processor's extension is used")]
                    let wide = unsafe { super::stop_mask_avx2(block) };
                    prop_assert_eq!(wide, mask);
                }
            }
        }
    }
}

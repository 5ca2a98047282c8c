//! Texts that look alike to a person, although their characters differ.

use std::collections::HashMap;

use super::normalize::fold_case_and_invisible;
use crate::base::hidden_characters::is_invisible;

/// The table that folds texts.
pub(super) struct LookalikeFolder {
    latin: HashMap<char, char>,
}

impl LookalikeFolder {
    pub(super) fn new() -> Self {
        let pairs = LOOKALIKES
            .iter()
            .flat_map(|(latin, others)| others.chars().map(|other| (other, *latin)));
        Self { latin: pairs.collect() }
    }

    /// Folds a text, so that texts are equal if a person takes one for the other: case, invisible characters, marks
    /// above and below letters, and the kind of dash do not count, and neither does the script of a letter. The result
    /// is for comparisons only, because different letters of one script become equal, too: `l`, `i` and `1` look alike.
    pub(super) fn fold_text(&self, text: &[u8]) -> String {
        let text = String::from_utf8_lossy(text);
        let shown = text.chars().filter(|letter| !is_invisible(*letter) && !is_mark(*letter));
        // The letters are replaced before the case is folded, because a letter may look like another one in capitals.
        let latin: String = shown.map(|letter| self.latin_lookalike(letter)).collect();
        let folded = fold_case_and_invisible(latin.as_bytes());
        folded.replace("rn", "m").replace("vv", "w").chars().map(fold_shape).collect()
    }

    /// Folds a name or an address: in addition to [`Self::fold_text`], only letters and digits count, and a last `bot`
    /// does not, with which forges mark programs.
    pub(super) fn fold_identity(&self, text: &[u8]) -> String {
        let mut name = self.fold_text(text);
        name.retain(char::is_alphanumeric);
        name.strip_suffix("bot").unwrap_or(&name).to_owned()
    }

    /// Returns the Latin letter, the digit or the sign that a character looks like, or the character itself.
    fn latin_lookalike(&self, letter: char) -> char {
        if letter.is_ascii() {
            return letter;
        }
        let code = u32::from(letter);
        let nth = |at: u32| u8::try_from(at % 26).map_or(letter, |at| char::from(b'a' + at));
        match code {
            // Wide forms of ASCII.
            0xff01..=0xff5e => char::from_u32(code - 0xfee0).unwrap_or(letter),
            // Mathematical letters and digits.
            0x1_d400..=0x1_d6a3 => nth(code - 0x1_d400),
            0x1_d7ce..=0x1_d7ff => char::from_digit((code - 0x1_d7ce) % 10, 10).unwrap_or(letter),
            // Letters in parentheses, in circles and in squares.
            0x249c..=0x24b5 => nth(code - 0x249c),
            0x24b6..=0x24e9 => nth(code - 0x24b6),
            0x1_f110..=0x1_f129 => nth(code - 0x1_f110),
            0x1_f130..=0x1_f149 => nth(code - 0x1_f130),
            0x1_f150..=0x1_f169 => nth(code - 0x1_f150),
            0x1_f170..=0x1_f189 => nth(code - 0x1_f170),
            0x1_f1e6..=0x1_f1ff => nth(code - 0x1_f1e6),
            _ => self.latin.get(&letter).copied().unwrap_or(letter),
        }
    }
}

/// Replaces the characters of ASCII that look alike by one of them.
fn fold_shape(letter: char) -> char {
    match letter {
        'l' | '1' | '|' | '!' => 'i',
        '0' => 'o',
        letter => letter,
    }
}

/// Returns true if a character is a mark that is drawn on the letter before it.
fn is_mark(letter: char) -> bool {
    matches!(letter, '\u{300}'..='\u{36f}' | '\u{483}'..='\u{489}' | '\u{1ab0}'..='\u{1aff}' | '\u{1dc0}'..='\u{1dff}'
        | '\u{20d0}'..='\u{20ff}' | '\u{fe20}'..='\u{fe2f}')
}

/// Characters by what they look like: those of other scripts that are drawn like a Latin letter, and Latin letters with
/// marks. Most of them are from <https://www.unicode.org/Public/security/latest/confusables.txt>.
const LOOKALIKES: &[(char, &str)] = &[
    ('-', "‐‑‒–—―−⁃﹘﹣־֊᠆⸺⸻〜ーｰ─━ㅡᅳ一⼀"),
    (':', "꞉∶ː˸﹕׃܃܄։"),
    ('a', "àáâãäåāăąǎȁȃȧạảấầẩẫậắằẳẵặḁÀÁÂÃÄÅĀĂĄǍȀȂȦẠẢẤẦẨẪẬẮẰẲẴẶḀаӑӓАӐӒαάΑΆɑɐᴀªₐᵃᎪꓮ⍺"),
    ('b', "ḃḅḇƀƃɓḂḄḆьЬвВβΒƄʙᏴᏏꓐ"),
    ('c', "çćĉċčƈÇĆĈĊČƇсСϲϹᴄⲥⲤℂℭⅽⅭᏟꓚ¢ↄ"),
    ('d', "ďđḋḍḏḑḓɖɗĎĐḊḌḎḐḒԁԀᴅⅾⅮᎠᏧꓒ"),
    ('e', "èéêëēĕėęěȅȇȩẹẻẽếềểễệḕḗḙḛÈÉÊËĒĔĖĘĚȄȆȨẸẺẼẾỀỂỄỆеёѐєэҽӗЕЁЀЄӖεέΕΈɛɘǝ℮ℯℰᴇᎬꓰ"),
    ('f', "ḟƒḞƑϝϜꞙꓝ"),
    ('g', "ĝğġģǧǵǥɠḡĜĞĠĢǦǴǤḠɡցԍԌɢᏀᏳꓖℊ"),
    ('h', "ĥħȟḣḥḧḩḫĤĦȞḢḤḦḨḪһҺհнНңҢΗΉʜℎℏᎻꓧ"),
    ('i', "ìíîïĩīĭįıǐȉȋịỉḭḯÌÍÎÏĨĪĬĮİǏȈȊỊỈіІїЇӏӀιίϊΙΊɩɪⅰⅠᎥꓲⲓⲒĺļľŀłḷḹḻḽĹĻĽĿŁḶḸḺḼℓⅼⅬʟƖǀ׀∣ןו"),
    ('j', "ĵǰɉĴɈјЈϳͿʝᎫꓙ"),
    ('k', "ķǩƙḱḳḵĶǨƘḰḲḴкКқҚκΚᴋᏦꓗ"),
    ('m', "ḿṁṃḾṀṂмМΜᴍⅿⅯᎷꓟ"),
    ('n', "ñńņňŉŋǹṅṇṉṋɲɳÑŃŅŇŊǸṄṆṈṊηήΝոռпɴꓠ"),
    ('o', "òóôõöøōŏőơǒǫȍȏȯọỏốồổỗộớờởỡợÒÓÔÕÖØŌŎŐƠǑǪȌȎȮỌỎỐỒỔỖỘỚỜỞỠỢоОӧӦοόΟΌσօՕᴏºₒ०୦൦ဝ〇ⲟⲞꓳ"),
    ('p', "ṕṗƥṔṖƤрРρΡϱᴘᏢꓑⲣⲢ"),
    ('q', "ɋʠԛԚգզ"),
    ('r', "ŕŗřȑȓṙṛṝṟŔŖŘȐȒṘṚṜṞгГᴦɾʀᏒꓣ"),
    ('s', "śŝşšșṡṣŚŜŞŠȘṠṢѕЅꜱՏᏚꓢ"),
    ('t', "ţťŧțṫṭṯṱƫŢŤŦȚṪṬṮṰтТҭҬτΤᴛᎢꓔ"),
    ('u', "ùúûüũūŭůűųưǔȕȗụủứừửữựÙÚÛÜŨŪŬŮŰŲƯǓȔȖỤỦỨỪỬỮỰυύսՍᴜʋꓴ"),
    ('v', "ṽṿṼṾνѵѴᴠⅴⅤᏙꓦ"),
    ('w', "ŵẁẃẅẇẉŴẀẂẄẆẈԝԜѡѠшшωᴡɯᎳꓪ"),
    ('x', "ẋẍẊẌхХҳҲχΧ×ⅹⅩꓫ"),
    ('y', "ýÿŷȳẏỳỵỷỹÝŸŶȲẎỲỴỶỸуУўЎүҮγΥΎϒʏɏᎩꓬ"),
    ('z', "źżžẑẓẕŹŻŽẐẒẔΖᴢᏃꓜ"),
];

#[cfg(test)]
mod tests {
    use super::LookalikeFolder;

    /// L4: Names that a person takes for the relay's are equal, and others differ.
    #[test]
    fn names_that_look_alike_are_equal() {
        let folder = LookalikeFolder::new();
        let own = folder.fold_identity(b"cogni-gateway");
        let alike = [
            "cogni\u{2011}gateway",
            "Cogni Gateway",
            "cogni_gateway",
            "cogni\u{200b}-gate\u{ad}way",
            "cogni\u{a0}\u{2013}\u{2003}gateway",
            "CΟGΝІ-GАТЕԜАУ",
            "соɡոі-ɡаtеԝау",
            "cognı-gateway",
            "cognl-gateway",
            "c0gn1-gateway",
            "cogni-gatevvay",
            "cógñi-gåtéwäÿ",
            "co\u{301}gni-gatewa\u{308}y",
            "ｃｏｇｎｉ－ｇａｔｅｗａｙ",
            "𝐜𝐨𝐠𝐧𝐢-𝓰𝓪𝓽𝓮𝔀𝓪𝔂",
            "ⓒⓞⓖⓝⓘ-🅶🅰🆃🅴🆆🅰🆈",
            "cogniーgateway",
            "cogni-gateway[bot]",
        ];
        for name in alike {
            assert_eq!(folder.fold_identity(name.as_bytes()), own, "{name}");
        }
        for name in ["cogni-agent", "gateway", "cogni-gateways", "Иван Петров", "東京", ""]
        {
            assert_ne!(folder.fold_identity(name.as_bytes()), own, "{name}");
        }
    }

    /// L4: Dashes stay apart from blanks and letters in the name of a trailer.
    #[test]
    fn a_dash_is_no_blank() {
        let folder = LookalikeFolder::new();
        let own = folder.fold_text(b"Sandbox-Run");
        assert_eq!(folder.fold_text("ЅаndЬох\u{2212}Rυn".as_bytes()), own);
        assert_ne!(folder.fold_text(b"sandbox run"), own);
    }
}

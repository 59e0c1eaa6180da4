// Texts in which the places are found where given tokens stood before, and the guess that these places lead to.
//
// A *place* is the number of tokens before it, so the token at a place is what followed them. Places with the same tokens
// before them are chained, the latest first, as compressors have done since LZ77. There are two chains, by four tokens and
// by one: in the second alone, the latest of the many places of a frequent token would hide a longer match.
//
// `indexed_text.py` and `suffix_index.py` own what is made here, and never use it in two threads at once. Token ids may be
// any numbers, and the time of a search is bounded in any text.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

namespace {

using Token = int32_t;

constexpr int64_t MOST_TOKENS = INT32_MAX;  // of a text: places are kept in 32 bits
constexpr int64_t FIRST_ROOM = 256;         // of an output's first text; each further one has room for twice as many
constexpr int KEY_LENGTHS[] = {4, 1};       // tokens by which places are chained; the second is the shortest match
constexpr int COMPARED = 8;                 // most tokens before a place that are compared: the longest match of a search
constexpr int LOOKED = 64;                  // places of a chain that are looked at; other tokens may share its slot
constexpr int FOUND = 4;                    // places of a text that are returned, and that vote
constexpr int FOLLOWED = 4;                 // least length of a match that is followed
constexpr int MOST_GUESSED = 64;

struct Chain {
    std::vector<int32_t> latest;   // the latest place, by the slot of the tokens before it; 0: none
    std::vector<int32_t> earlier;  // for each place the one before it in its chain; 0: none

    // A text may be empty, and a slot is needed nevertheless.
    explicit Chain(int64_t room) : latest(room + 1), earlier(room) {}

    int32_t &latest_after(const Token *end, int key_length) {
        uint64_t hash = 0;
        for (const Token *one = end - key_length; one < end; one++)
            hash = (hash ^ static_cast<uint32_t>(*one)) * 0x9E3779B97F4A7C15u;
        return latest[(hash >> 32) * latest.size() >> 32];
    }
};

class Text;

struct Match {
    int64_t length = 0;
    const Text *text = nullptr;
    int64_t place = 0;
};

class Text {
  public:
    // The tokens are the caller's, and stay where and what they are.
    Text(const Token *tokens, int64_t count) : Text(tokens, count, count, 0) {}

    // Tokens come later, at most `room` after those that it begins with, which are copied and whose places are not found.
    Text(const Token *first, int64_t first_count, int64_t room) : Text(nullptr, first_count, first_count + room, first_count) {
        own_.resize(room_);
        std::copy_n(first, first_count, own_.begin());
        tokens_ = own_.data();
    }

    Text(const Text &) = delete;
    Text &operator=(const Text &) = delete;

    int64_t count() const { return count_; }
    int64_t left_count() const { return room_ - count_; }
    const Token *at(int64_t place) const { return tokens_ + place; }

    // Adds tokens as far as there is room; returns how many. A text of the caller's tokens has none.
    int64_t extend(const Token *tokens, int64_t count) {
        const int64_t added = std::min(count, left_count());
        std::copy_n(tokens, added, own_.begin() + (own_.empty() ? 0 : count_));
        count_ += added;
        return added;
    }

    // Chains the places that are new. What follows the last token is not known: its place is added with the next token.
    void chain() {
        for (; chained_ < count_; chained_++)
            for (int i = 0; i < 2; i++)
                if (chained_ >= KEY_LENGTHS[i]) {
                    int32_t &latest = chains_[i].latest_after(at(chained_), KEY_LENGTHS[i]);
                    chains_[i].earlier[chained_] = latest;
                    latest = static_cast<int32_t>(chained_);
                }
    }

    // Writes the latest chained places that at least `KEY_LENGTHS[which]` tokens before `end` stand before, at most FOUND.
    // Of the `count` tokens before `end` all are compared. Returns how many places there are.
    int matches(int which, const Token *end, int64_t count, Match *found) {
        int found_count = 0;
        int64_t place = chains_[which].latest_after(end, KEY_LENGTHS[which]);
        for (int i = 0; i < LOOKED && place && found_count < FOUND; i++) {
            int64_t length = 0;
            const int64_t most = std::min(count, place);
            while (length < most && tokens_[place - 1 - length] == end[-1 - length]) length++;
            if (length >= KEY_LENGTHS[which]) found[found_count++] = {length, this, place};
            place = chains_[which].earlier[place];
        }
        return found_count;
    }

  private:
    Text(const Token *tokens, int64_t count, int64_t room, int64_t first_place)
        : tokens_(tokens), count_(count), room_(room), chained_(std::max<int64_t>(first_place, 1)),
          chains_{Chain(room), Chain(room)} {}

    std::vector<Token> own_;
    const Token *tokens_;
    int64_t count_, room_;
    int64_t chained_;  // the places before this one are chained, or are not to be found
    Chain chains_[2];
};

// Writes the latest places that the latest tokens stand before, in the order of the texts: those of the longest of KEY_LENGTHS
// that is found. `found` has room for 2 * FOUND. Returns how many they are.
int latest_matches(Text *const *texts, int64_t text_count, const Token *end, int64_t count, Match *found) {
    count = std::min<int64_t>(count, COMPARED);
    int found_count = 0;
    for (int which = 0; which < 2 && !found_count; which++) {
        if (count < KEY_LENGTHS[which]) continue;
        for (int64_t i = 0; i < text_count && found_count < FOUND; i++) {
            texts[i]->chain();
            found_count += texts[i]->matches(which, end, count, found + found_count);
        }
    }
    return found_count;
}

// `library.py` describes it again.
struct Guess {
    int64_t token_count;
    int64_t match_length;
    double shares[MOST_GUESSED];
    Token token_ids[MOST_GUESSED];
};

// Tokens that followed a place.
struct Vote {
    const Token *token_ids;
    int64_t count;
    bool repeats;  // they end where the guess begins, so its own first tokens follow them
};

// Writes at most `most` tokens that most votes go on with, and their shares. Each token counts the votes for all before it;
// of equally many votes the first ones win.
void agree(Vote *votes, int64_t vote_count, int64_t most, Guess *guess) {
    for (int64_t at = 0;; at++) {
        const auto token_of = [=](const Vote &v) { return at < v.count ? v.token_ids[at] : guess->token_ids[at - v.count]; };
        const auto ends = [=](const Vote &v) { return at >= v.count && !v.repeats; };
        const int64_t going_on = std::remove_if(votes, votes + vote_count, ends) - votes;
        guess->token_count = at;
        if (!going_on || at >= most) return;
        int64_t largest = 0;
        Token chosen = 0;
        for (const Vote *one = votes; one < votes + going_on; one++) {
            const Token token = token_of(*one);
            const int64_t count = std::count_if(votes, votes + going_on, [=](const Vote &v) { return token_of(v) == token; });
            if (count > largest) largest = count, chosen = token;
        }
        guess->token_ids[at] = chosen;
        guess->shares[at] = static_cast<double>(largest) / going_on;
        std::remove_if(votes, votes + going_on, [=](const Vote &v) { return token_of(v) != chosen; });
        vote_count = largest;
    }
}

// Guesses at most `most` tokens that followed the longest matches, by a vote of those that are at least half as long: what
// SuffixDecoding (Oliaro et al., arXiv 2411.04975) keeps as counts in the nodes of a suffix tree. Of equal ones the first win.
// `latest` is the text at whose end the guess begins; null: none of these. What followed a place in it goes on with the guess
// itself, as copies of LZ77 do.
void guess_of(Match *matches, int match_count, const Text *latest, int64_t most, Guess *guess) {
    std::stable_sort(matches, matches + match_count, [](const Match &a, const Match &b) { return a.length > b.length; });
    Vote votes[FOUND];
    int64_t vote_count = 0;
    for (const Match *one = matches; one < matches + std::min(match_count, FOUND); one++)
        if (2 * one->length >= matches->length)
            votes[vote_count++] = {one->text->at(one->place), one->text->count() - one->place, one->text == latest};
    guess->match_length = match_count ? matches->length : 0;
    agree(votes, vote_count, most, guess);
}

// The prompt and the output of a generation.
class Suffixes {
  public:
    // The prompt is the caller's; generations may share it.
    explicit Suffixes(Text *prompt) : texts_{prompt} {}

    // Adds tokens of the output, each once and in order, and guesses what may follow them.
    void guess(const Token *added, int64_t added_count, int64_t most, Guess *guess) {
        extend(added, added_count);
        follow(added, added_count);
        const Text &latest = *texts_.front();
        if (followed_.length >= COMPARED) {
            Match followed = followed_;
            guess_of(&followed, 1, &latest, most, guess);
            if (guess->token_count) return;
        }
        Match found[2 * FOUND];
        const int count = latest_matches(texts_.data(), texts_.size(), latest.at(latest.count()), latest.count(), found);
        guess_of(found, count, &latest, most, guess);
        followed_ = count && found->length >= FOLLOWED ? *found : Match{};
    }

  private:
    // A full text never moves, so no round waits for that.
    void extend(const Token *tokens, int64_t count) {
        while (count) {
            if (own_.empty() || !own_.back()->left_count()) begin_text();
            const int64_t added = own_.back()->extend(tokens, count);
            tokens += added, count -= added;
        }
    }

    // A text begins with the end of the one before, for matches that lie in both.
    void begin_text() {
        const Text &before = *texts_.front();
        const int64_t overlap = std::min<int64_t>(before.count(), COMPARED);
        const int64_t room = FIRST_ROOM << std::min<size_t>(own_.size(), 20);
        own_.push_back(std::make_unique<Text>(before.at(before.count() - overlap), overlap, room));
        texts_.insert(texts_.begin(), own_.back().get());
    }

    // Keeps the last guess's match if it went on with the tokens since then.
    void follow(const Token *tokens, int64_t count) {
        if (!followed_.length) return;
        const bool goes_on = followed_.text->count() - followed_.place >= count &&
                             std::equal(tokens, tokens + count, followed_.text->at(followed_.place));
        followed_ = goes_on ? Match{followed_.length + count, followed_.text, followed_.place + count} : Match{};
    }

    std::vector<std::unique_ptr<Text>> own_;  // of the output, the latest last
    std::vector<Text *> texts_;               // these and the prompt, the latest first
    Match followed_;  // the longest match of the last guess, if it is long: while it goes on, no other is looked for
};

// Returns what `make` makes; nothing where memory is short.
template <typename Make> auto made(Make make) -> decltype(make()) {
    try {
        return make();
    } catch (const std::exception &) {
        return {};
    }
}

}  // namespace

extern "C" {

// Identifies the source of this library; `library.py` refuses one from another source.
uint32_t paceline_source() { return PACELINE_SOURCE; }

int64_t paceline_guess_bytes() { return sizeof(Guess); }

// Indexes a whole text, which stays the caller's.
Text *paceline_text_of(const Token *tokens, int64_t count) {
    if (count < 0 || count >= MOST_TOKENS) return nullptr;
    return made([=] {
        auto text = std::make_unique<Text>(tokens, count);
        text->chain();
        return text.release();
    });
}

// Makes an empty text with room.
Text *paceline_text_with_room(int64_t room) {
    if (room < 0 || room >= MOST_TOKENS) return nullptr;
    return made([=] { return new Text(nullptr, 0, room); });
}

void paceline_text_delete(Text *text) { delete text; }

int64_t paceline_text_extend(Text *text, const Token *tokens, int64_t count) { return text->extend(tokens, count); }

// Guesses from several texts what may follow the `count` tokens.
void paceline_text_guess(Text *const *texts, int64_t text_count, const Token *latest, int64_t count, int64_t most, Guess *guess) {
    Match found[2 * FOUND];
    const int found_count = latest_matches(texts, text_count, latest + count, count, found);
    guess_of(found, found_count, nullptr, std::min<int64_t>(most, MOST_GUESSED), guess);
}

// Writes lengths and places of matches with the `count` tokens, at most FOUND; returns how many.
int paceline_text_find(Text *text, const Token *latest, int64_t count, int64_t *lengths, int64_t *places) {
    Match found[2 * FOUND];
    const int found_count = latest_matches(&text, 1, latest + count, count, found);
    for (int i = 0; i < found_count; i++) lengths[i] = found[i].length, places[i] = found[i].place;
    return found_count;
}

Suffixes *paceline_suffixes_of(Text *prompt) {
    return made([=] { return new Suffixes(prompt); });
}

void paceline_suffixes_delete(Suffixes *suffixes) { delete suffixes; }

// Returns whether there was memory.
bool paceline_suffixes_guess(Suffixes *suffixes, const Token *added, int64_t added_count, int64_t most, Guess *guess) {
    return made([=] {
        suffixes->guess(added, added_count, std::min<int64_t>(most, MOST_GUESSED), guess);
        return true;
    });
}
}
